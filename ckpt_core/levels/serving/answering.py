"""What a peer is asked, and what it answers: the subset of S3 that the levels need, and 501 for the rest.

    GET /steps/KEY  HEAD                 an object, or a range of it; If-None-Match
    GET /steps?list-type=2               a list, flat or of one folder, in pages
    GET /steps?uploads                   what comes in parts and has not ended
    PUT /steps/KEY                       whole, or not at all; If-Match, If-None-Match: *
    PUT /steps/KEY  x-amz-copy-source    a link to a file of a step that is here, read and found right
    POST /steps/KEY?uploads  PUT ?partNumber&uploadId  POST ?uploadId  DELETE ?uploadId
    DELETE /steps/KEY  POST /steps?delete

A body is compared with the sum that was signed before anything comes of it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import itertools
import re
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from ckpt_core.levels.serving.allowing import check_content_is_signed, content_sum
from ckpt_core.levels.serving.linking import link
from ckpt_core.levels.serving.tree import Condition, Row, Thing, Tree
from ckpt_core.levels.serving.uploads import Upload, Uploads
from ckpt_core.levels.serving.wire import Answer, Connection, FilePart, Refusal, Request
from ckpt_core.levels.tokens import PEER_BUCKET, Keys
from ckpt_core.system.files import Files

PAGE_ROWS = 1000
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")
_PART = re.compile(r"<Part>(.*?)</Part>", re.DOTALL)
_KNOWN_FIELDS = {"delete", "uploads", "partNumber", "uploadId"}
_KNOWN_FIELDS |= {
    "list-type",
    "prefix",
    "delimiter",
    "continuation-token",
    "start-after",
    "max-keys",
}


class Desk:
    """Answers requests that are allowed. Thread-safe."""

    def __init__(self, tree: Tree, keys: Keys, *, files: Files, page_rows: int = PAGE_ROWS) -> None:
        self._tree, self._keys, self._files = tree, keys, files
        self._uploads = Uploads(tree, files=files)
        self._page_rows = page_rows

    def answer(self, request: Request, connection: Connection) -> Answer:
        """Do what is asked, all that is read of the body included.

        Raises:
            Refusal: and nothing was done.
            Gone: the client left before it had sent everything; likewise.
        """
        bucket, key = request.names
        asked = {*request.fields}
        if bucket != PEER_BUCKET:
            raise Refusal(404, "NoSuchBucket")
        source = request.headers.get("x-amz-copy-source")
        if asked - _KNOWN_FIELDS or (source is not None and (asked or request.method != "PUT")):
            raise Refusal(501, "NotImplemented")
        check_content_is_signed(request)
        match request.method:
            case "PUT" if key and source is not None:
                return self._link(request, source, key)
            case "GET" | "HEAD" if key and not asked:
                return self._get(request, key)
            case "GET" if not key and "uploads" in asked:
                return self._begun(request.fields.get("prefix", ""))
            case "GET" if not key and "list-type" in asked:
                return self._list(request.fields)
            case "PUT" if key and "uploadId" in asked:
                return self._put_part(request, key, connection)
            case "PUT" if key and not asked:
                return self._put(request, key, connection)
            case "DELETE" if key and "uploadId" in asked:
                self._uploads.abort(request.fields["uploadId"], key)
                return Answer(204)
            case "DELETE" if key and not asked:
                self._tree.delete([key])
                return Answer(204)
            case "POST":
                return self._post(request, key, connection)
        raise Refusal(501, "NotImplemented")

    def close(self) -> None:
        """Give up what comes in parts."""
        self._uploads.close()

    # -- objects ---------------------------------------------------------------------------------

    def _get(self, request: Request, key: str) -> Answer:
        thing = self._tree.open(key)
        if thing is None:
            raise Refusal(404, "NoSuchKey")
        answer = self._of(thing, request)
        if not isinstance(answer.content, FilePart):
            self._files.close(thing.fd)
        return answer

    def _of(self, thing: Thing, request: Request) -> Answer:
        headers = {"ETag": thing.tag, "Last-Modified": formatdate(thing.changed_s, usegmt=True)}
        if request.headers.get("if-none-match") in (thing.tag, "*"):
            return Answer(304, headers=headers)
        if request.headers.get("if-match", thing.tag) not in (thing.tag, "*"):
            return Answer(412, headers=headers)
        if request.method == "HEAD":
            return Answer(headers=headers, nbytes=thing.nbytes)
        asked = request.headers.get("range")
        if asked is None:
            return Answer(200, FilePart(thing.fd, 0, thing.nbytes), headers)
        found = _RANGE.fullmatch(asked)
        if found is None:
            return Answer(501)
        begin, end = int(found[1]), min(int(found[2] or thing.nbytes), thing.nbytes - 1)
        if begin > end:
            return Answer(416, _error("InvalidRange"))
        headers["Content-Range"] = f"bytes {begin}-{end}/{thing.nbytes}"
        return Answer(206, FilePart(thing.fd, begin, end - begin + 1), headers)

    def _put(self, request: Request, key: str, connection: Connection) -> Answer:
        over = _condition(request)
        self._tree.check_key(key)
        path, fd = self._tree.begin_over(request.nbytes) if over.match else self._tree.begin()
        try:
            try:
                self._receive(request, connection, fd, 0)
            finally:
                self._files.close(fd)
            tag = self._tree.publish(path, key, over)
        except BaseException:
            self._tree.discard(path)
            raise
        return Answer(headers={"ETag": tag})

    def _link(self, request: Request, source: str, key: str) -> Answer:
        if request.nbytes:
            raise Refusal(501, "NotImplemented")
        bucket, _, known = unquote(source, errors="surrogateescape").lstrip("/").partition("/")
        if bucket != PEER_BUCKET:
            raise Refusal(404, "NoSuchBucket")
        tag, changed_s = link(self._tree, known, key, _condition(request), files=self._files)
        rows = [f"<ETag>{escape(tag)}</ETag>", f"<LastModified>{_iso(changed_s)}</LastModified>"]
        return _xml("CopyObjectResult", rows)

    def _put_part(self, request: Request, key: str, connection: Connection) -> Answer:
        fields = request.fields
        number = _number(fields.get("partNumber", ""))
        upload, place = self._uploads.place(fields["uploadId"], key, number, request.nbytes)
        try:
            tag = f'"{self._receive(request, connection, place.fd, place.at)}"'
        except BaseException:
            self._uploads.failed(upload, place)
            raise
        self._uploads.arrived(upload, number, place, request.nbytes, tag)
        return Answer(headers={"ETag": tag})

    def _receive(self, request: Request, connection: Connection, fd: int, at: int) -> str:
        """Write a body durably; its sum, which is what was signed."""
        if "content-length" not in request.headers:
            raise Refusal(411, "MissingContentLength")
        if "x-amz-checksum-sha256" in request.headers:
            self._check_they_agree(request)
        wanted, found = content_sum(request, self._keys)
        for piece in connection.body():
            found.update(piece)
            self._tree.write(fd, piece, at)
            at += len(piece)
        if not hmac.compare_digest(found.hexdigest(), wanted):
            raise Refusal(400, "XAmzContentSHA256Mismatch")
        self._tree.sync(fd)
        return wanted

    @staticmethod
    def _check_they_agree(request: Request) -> None:
        """Of two sums of a body, the other one is not compared with the bytes."""
        digest = bytes.fromhex(request.headers["x-amz-content-sha256"].rpartition("-")[2])
        if request.headers["x-amz-checksum-sha256"] != base64.b64encode(digest).decode():
            raise Refusal(400, "BadDigest")

    # -- what is asked by a list -----------------------------------------------------------------

    def _post(self, request: Request, key: str, connection: Connection) -> Answer:
        text, fields = self._text(request, connection), request.fields
        if not key and "delete" in fields:
            keys = [html.unescape(one) for one in re.findall("<Key>(.*?)</Key>", text, re.DOTALL)]
            self._tree.delete(keys)
            rows = [f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys]
            return _xml("DeleteResult", rows)
        if key and "uploads" in fields:
            name = self._uploads.begin(key)
            names = f"<Bucket>{PEER_BUCKET}</Bucket><Key>{escape(key)}</Key>"
            return _xml("InitiateMultipartUploadResult", [names, f"<UploadId>{name}</UploadId>"])
        if key and "uploadId" in fields:
            parts = [
                (_number(_inner(one, "PartNumber")), html.unescape(_inner(one, "ETag")))
                for one in _PART.findall(text)
            ]
            tag = self._uploads.end(fields["uploadId"], key, parts, _condition(request))
            return _xml("CompleteMultipartUploadResult", [f"<ETag>{escape(tag)}</ETag>"])
        raise Refusal(501, "NotImplemented")

    def _text(self, request: Request, connection: Connection) -> str:
        data = connection.text()
        if hashlib.sha256(data).hexdigest() != check_content_is_signed(request):
            raise Refusal(400, "XAmzContentSHA256Mismatch")
        return data.decode(errors="replace")

    # -- lists -----------------------------------------------------------------------------------

    def _list(self, fields: dict[str, str]) -> Answer:
        prefix, delimiter = fields.get("prefix", ""), fields.get("delimiter", "")
        if delimiter not in ("", "/") or (prefix and not prefix.endswith("/")):
            raise Refusal(501, "NotImplemented")
        text = unquote(fields.get("continuation-token", "")) or fields.get("start-after", "")
        after = text.encode(errors="surrogateescape")
        most = min(_number(fields.get("max-keys", str(self._page_rows))), self._page_rows)
        rows = (row for row in self._tree.look(prefix, flat=not delimiter) if _key(row) > after)
        page = list(itertools.islice(rows, most))
        more = bool(page) and next(rows, None) is not None
        found = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            token = quote(_key(page[-1]))
            found.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        return _xml("ListBucketResult", [*found, *map(_row, page)])

    def _begun(self, prefix: str) -> Answer:
        begun = [one for one in self._uploads.begun() if one.key.startswith(prefix)]
        return _xml("ListMultipartUploadsResult", [_begun_row(one) for one in begun])


def refused(refusal: Refusal) -> Answer:
    """What a refusal says. Never anything that was asked with."""
    return Answer(refusal.status, _error(refusal.code), {"Content-Type": "application/xml"})


def _condition(request: Request) -> Condition:
    none = request.headers.get("if-none-match")
    if none not in (None, "*"):
        raise Refusal(501, "NotImplemented")
    return Condition(match=request.headers.get("if-match"), create=none == "*")


def _key(row: Row | str) -> bytes:
    return (row if isinstance(row, str) else row.key).encode(errors="surrogateescape")


def _row(row: Row | str) -> str:
    if isinstance(row, str):
        return f"<CommonPrefixes><Prefix>{escape(row)}</Prefix></CommonPrefixes>"
    size = f"<Size>{row.nbytes}</Size>"
    when = f"<LastModified>{_iso(row.changed_s)}</LastModified>"
    return f"<Contents><Key>{escape(row.key)}</Key>{when}{size}</Contents>"


def _begun_row(upload: Upload) -> str:
    names = f"<Key>{escape(upload.key)}</Key><UploadId>{upload.name}</UploadId>"
    return f"<Upload>{names}<Initiated>{_iso(upload.began_s)}</Initiated></Upload>"


def _xml(name: str, inside: list[str]) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{"".join(inside)}</{name}>'
    return Answer(200, text.encode(errors="replace"), {"Content-Type": "application/xml"})


def _error(code: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'.encode()


def _inner(text: str, name: str) -> str:
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[1] if found else ""


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise Refusal(400, "InvalidArgument")
    return int(text)


def _iso(when_s: float) -> str:
    return datetime.fromtimestamp(when_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
