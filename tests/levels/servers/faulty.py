"""An object store of our own on loopback, S3's subset that obstore speaks, which can be told to fail.

    with FaultServer() as server:
        server.fault = at(3, "reset")               # the third request from now on
        ObjectFar(server.url("run"), environ=server.environ())

A fault is asked for at each request and says one word, or None:

    503, 507, 403, 400   that status, nothing done          reset      cut before anything is done
    lost                 done, and cut before the answer    torn       half of the body goes, then cut
    slow                 a tenth of a second late               hang       silent until the server ends
    hold                 late: done when `release` is set
    kill, kill-after     SIGKILL `victim`, before or after  stop, stop-after   SIGSTOP it
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import html
import itertools
import os
import re
import signal
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from xml.sax.saxutils import escape

SECRET = "seCret+Key/that_no_text_may_hold"
BUCKET = "bucket"
_DEAD_S = 60.0


@dataclass
class Request:
    """One request, and what it is about."""

    number: int
    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    target: str = ""
    body: bytes = b""

    def __str__(self) -> str:
        words = [
            word for word in ("uploads", "uploadId", "delete", "list-type") if word in self.query
        ]
        return " ".join([self.method, self.key, *words])


@dataclass
class Thing:
    """An object."""

    data: bytes
    tag: str
    changed_s: float


@dataclass
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Fault = Callable[[Request], str | None]


def never(request: Request) -> None:
    """No fault."""


def at(number: int, word: str, *, like: str = "") -> Fault:
    """The n-th request, from 1, whose text has `like` in it."""
    counter = itertools.count(1)
    return lambda request: word if like in str(request) and next(counter) == number else None


def always(word: str, *, like: str = "") -> Fault:
    """Each request whose text has `like` in it."""
    return lambda request: word if like in str(request) else None


class FaultServer:
    """Serves from construction until `close`, on a port that the system chooses; keeps all in memory."""

    def __init__(self, *, buckets: tuple[str, ...] = (BUCKET,), sink: bool = False) -> None:
        self.objects: dict[str, Thing] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.began_s: dict[str, float] = {}
        self.requests: list[str] = []
        """What has been asked for, in order."""
        self.fault: Fault = never
        self.victim = 0
        self.release = threading.Event()
        self.conditions = True
        """False: conditions are accepted and ignored, as some servers do."""
        self.skew_s = 0.0
        """What the server's clock is ahead of ours."""
        self.encrypts = False
        """True: tags are not the MD5 of the bytes."""
        self.page = 1000
        """Most parts and uploads that one answer tells of."""
        self.room_bytes: int | None = None
        """What still fits; None: anything."""
        self.buckets = buckets
        self.sink = sink
        """Parts and large objects are forgotten as soon as they are there: for measuring."""
        self._listed: dict[str, Thing] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._connections: set[socket.socket] = set()
        self._numbers = itertools.count(1)
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    outer._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def process_request(self, request: Any, client_address: Any) -> None:
                # Before its thread begins, so that it is known from the moment that it is accepted.
                outer._connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                super().shutdown_request(request)
                outer._connections.discard(request)

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    # -- for tests -------------------------------------------------------------------------------

    def url(self, prefix: str = "run") -> str:
        """A level here."""
        return f"s3://{self.buckets[0] if self.buckets else BUCKET}/{prefix}"

    def environ(self) -> dict[str, str]:
        """What a client has to find in its environment."""
        return s3_environ(self.port)

    def lag(self, on: bool) -> None:
        """Lists show what is there now, whatever is written and deleted later, until this is set off."""
        with self._lock:
            self._listed = dict(self.objects) if on else None

    def keys(self, prefix: str = "") -> list[str]:
        """What is there."""
        with self._lock:
            return sorted(key for key in self.objects if key.startswith(prefix))

    def connected(self) -> frozenset[socket.socket]:
        """The connections that are open now."""
        return frozenset(self._connections)

    def wait_for_the_dead(self, *, but: Collection[socket.socket] = ()) -> None:
        """Until what clients that have ended had sent is dealt with: connections are left only of `but`."""
        deadline = time.monotonic() + _DEAD_S
        with socket.create_connection(("127.0.0.1", self.port), _DEAD_S) as last:
            last.shutdown(socket.SHUT_WR)
            last.recv(1)  # answered by its end: all that came before it have been accepted, too
        while self.connected().difference(but):
            assert time.monotonic() < deadline, "connections of clients that have ended stay open"
            time.sleep(0.01)

    def close(self) -> None:
        """End; whoever hangs is let go."""
        self._over.set()
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- one connection --------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = connection.makefile("rb", buffering=1 << 16)
        while line := stream.readline():
            method, target, _ = line.decode().split()
            headers: dict[str, str] = {}
            while (line := stream.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            path, _, query = target.partition("?")
            fields = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
            key = urllib.parse.unquote(path).lstrip("/")
            request = Request(next(self._numbers), method, key, fields, headers, target)
            self.requests.append(str(request))
            length = int(headers.get("content-length", 0))
            if not self._answer(connection, stream, request, length):
                return

    def _answer(self, connection, stream, request: Request, length: int) -> bool:  # type: ignore[no-untyped-def]
        word = self.fault(request) or ""
        if word == "hang":
            self._over.wait()
        if word == "torn" and length:
            stream.read(length // 2)
        if word in ("reset", "hang") or (word == "torn" and length):
            return _cut(connection)
        drops = self.sink and length > 1 << 20
        request.body = _dropped(connection, stream, length) if drops else _body(stream, length)
        self._strike(word, "")
        if word == "hold":
            self.release.wait()
        if word == "slow":
            time.sleep(0.1)
        reply = Reply(int(word), _error(word)) if word.isdigit() else self._do(request)
        self._strike(word, "-after")
        if word == "lost" or (word == "torn" and not reply.body):
            return _cut(connection)
        reply.headers.setdefault("Content-Length", str(len(reply.body)))
        reply.headers["Date"] = _http_date(self._now())
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{k}: {v}" for k, v in reply.headers.items())]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        if word == "torn":
            connection.sendall(reply.body[: len(reply.body) // 2])
            return _cut(connection)
        if request.method != "HEAD":
            connection.sendall(reply.body)
        return True

    def _strike(self, word: str, when: str) -> None:
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            if word == name + when:
                os.kill(self.victim, number)
                if name == "kill":
                    self._over.wait(0.2)  # what it was about to hear, it never hears

    # -- what S3 does ----------------------------------------------------------------------------

    def _now(self) -> float:
        return time.time() + self.skew_s

    def _do(self, request: Request) -> Reply:
        bucket, _, request.key = request.key.partition("/")
        if bucket not in self.buckets:
            return Reply(404, _error("NoSuchBucket"))
        with self._lock:
            if request.method == "POST":
                return self._post(request)
            if request.method == "GET" and "uploads" in request.query:
                return Reply(200, _xml("ListMultipartUploadsResult", self._begun(request.query)))
            if request.method == "GET" and "uploadId" in request.query:
                return self._parts(request.query)
            if request.method == "GET" and not request.key:
                return self._list(request.query)
            done = {"PUT": self._put, "GET": self._get, "HEAD": self._get, "DELETE": self._delete}
            return done[request.method](request)

    def _put(self, request: Request) -> Reply:
        if self.room_bytes is not None:
            if len(request.body) > self.room_bytes:
                return Reply(507, _error("XMinioStorageFull"))
            self.room_bytes -= len(request.body)
        if "partNumber" in request.query:
            if request.query["uploadId"] not in self.uploads:
                return Reply(404, _error("NoSuchUpload"))
            number = int(request.query["partNumber"])
            self.uploads[request.query["uploadId"]][1][number] = b"" if self.sink else request.body
            return Reply(200, headers={"ETag": self._tag_of(request.body)})
        there = self.objects.get(request.key)
        if self.conditions and not _allowed(there, request.headers):
            return Reply(412, _error("PreconditionFailed"))
        return self._keep(request.key, request.body)

    def _keep(self, key: str, data: bytes) -> Reply:
        tag = self._tag_of(data)
        self.objects[key] = Thing(
            b"" if self.sink and len(data) > 1 << 20 else data, tag, self._now()
        )
        return Reply(200, headers={"ETag": tag})

    def _get(self, request: Request) -> Reply:
        there = self.objects.get(request.key)
        if there is None:
            return Reply(404, _error("NoSuchKey"))
        headers = {"ETag": there.tag, "Last-Modified": _http_date(there.changed_s)}
        if request.headers.get("if-none-match") == there.tag:
            return Reply(304, headers=headers)
        size = len(there.data)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if match is None or request.method == "HEAD":
            headers["Content-Length"] = str(size)
            return Reply(200, there.data, headers)
        begin, end = int(match[1]), min(int(match[2] or size), size - 1)
        if begin >= size:
            return Reply(416, _error("InvalidRange"))
        headers["Content-Range"] = f"bytes {begin}-{end}/{size}"
        return Reply(206, there.data[begin : end + 1], headers)

    def _delete(self, request: Request) -> Reply:
        if "uploadId" in request.query:
            self.uploads.pop(request.query["uploadId"], None)
        else:
            self.objects.pop(request.key, None)
        return Reply(204)

    def _post(self, request: Request) -> Reply:
        if "uploads" in request.query:
            upload = f"u{request.number}"
            self.uploads[upload] = (request.key, {})
            self.began_s[upload] = self._now()
            return Reply(
                200, _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            )
        if "delete" in request.query:
            keys = re.findall(r"<Key>(.*?)</Key>", request.body.decode())
            for key in keys:
                self.objects.pop(html.unescape(key), None)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return Reply(200, _xml("DeleteResult", gone))
        found = self.uploads.get(request.query["uploadId"])
        if found is None:
            return Reply(404, _error("NoSuchUpload"))
        key, parts = found
        text = html.unescape(request.body.decode())
        numbers, tags = (
            re.findall(f"<{name}>(.*?)</{name}>", text) for name in ("PartNumber", "ETag")
        )
        asked = dict(zip(map(int, numbers), tags, strict=True))
        if not self.sink and asked != {n: self._tag_of(parts[n]) for n in parts}:
            return Reply(400, _error("InvalidPart"))
        del self.uploads[request.query["uploadId"]]
        tag = self._keep(key, b"".join(parts[number] for number in sorted(parts))).headers["ETag"]
        return Reply(200, _xml("CompleteMultipartUploadResult", f"<ETag>{escape(tag)}</ETag>"))

    def _tag_of(self, data: bytes) -> str:
        digest = hashlib.md5(data).hexdigest()
        return f'"{digest[::-1] if self.encrypts else digest}"'

    def _parts(self, query: dict[str, str]) -> Reply:
        if query["uploadId"] not in self.uploads:
            return Reply(404, _error("NoSuchUpload"))
        after = int(query.get("part-number-marker", 0))
        parts = self.uploads[query["uploadId"]][1]
        numbers = sorted(number for number in parts if number > after)
        page = numbers[: self.page]
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(self._tag_of(parts[number]))}</ETag>"
            f"<Size>{len(parts[number])}</Size></Part>"
            for number in page
        )
        more = f"<IsTruncated>{str(len(numbers) > len(page)).lower()}</IsTruncated>"
        last = f"<NextPartNumberMarker>{page[-1] if page else 0}</NextPartNumberMarker>"
        return Reply(200, _xml("ListPartsResult", more + last + rows))

    def _begun(self, query: dict[str, str]) -> str:
        # Order: by key, then by their beginning; names are in that order, too.
        known = sorted((key, self.began_s[name], name) for name, (key, _) in self.uploads.items())
        places = [(key, name) for key, _, name in known if key.startswith(query["prefix"])]
        after = query.get("key-marker", ""), query.get("upload-id-marker", "")
        left = places[places.index(after) + 1 if after in places else 0 :]
        page = left[: self.page]
        rows = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            f"<Initiated>{_iso(self.began_s[upload])}</Initiated></Upload>"
            for key, upload in page
        )
        key, name = page[-1] if page else ("", "")
        return (
            f"<IsTruncated>{str(len(left) > len(page)).lower()}</IsTruncated>"
            f"<NextKeyMarker>{escape(key)}</NextKeyMarker>"
            f"<NextUploadIdMarker>{name}</NextUploadIdMarker>{rows}"
        )

    def _list(self, query: dict[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        things = self.objects if self._listed is None else self._listed
        rows: list[str] = []
        folders: set[str] = set()
        last = ""
        for key in sorted(key for key in things if key.startswith(prefix) and key > after):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                folders.add(key[: cut + 1])
                continue
            if len(rows) == 1000:
                break
            rows.append(_row(key, things[key]))
            last = key
        else:
            last = ""
        more = f"<IsTruncated>{str(bool(last)).lower()}</IsTruncated>"
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if last else ""
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        )
        return Reply(200, _xml("ListBucketResult", more + token + "".join(rows) + common))


def s3_environ(port: int) -> dict[str, str]:
    """What a client of a server on this port has to find in its environment."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "AKIDTEST",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def in_environment(values: dict[str, str]) -> Iterator[None]:
    """These variables are set meanwhile, also for processes that are started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _body(stream, length: int) -> bytes:  # type: ignore[no-untyped-def]
    body = stream.read(length) if length else b""
    if len(body) < length:
        raise ConnectionResetError
    return bytes(body)


def _dropped(connection: socket.socket, stream, length: int) -> bytes:  # type: ignore[no-untyped-def]
    buffered = min(length, len(stream.peek()))
    stream.read(buffered)
    space = bytearray(1 << 20)
    left = length - buffered
    while left:
        # The kernel counts the bytes and copies none.
        got = connection.recv_into(space, min(left, len(space)), socket.MSG_TRUNC)
        if not got:
            raise ConnectionResetError
        left -= got
    return b""


def _cut(connection: socket.socket) -> bool:
    # Zero seconds of lingering: the other side sees a reset.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    return False


def _allowed(there: Thing | None, headers: dict[str, str]) -> bool:
    if headers.get("if-none-match") == "*" and there is not None:
        return False
    wants = headers.get("if-match")
    return wants is None or (there is not None and there.tag == wants)


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode()


def _error(code: str) -> bytes:
    return _xml("Error", f"<Code>{code}</Code><Message>{SECRET}</Message>")


def _row(key: str, thing: Thing) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(thing.changed_s)}</LastModified>"
        f"<ETag>{escape(thing.tag)}</ETag><Size>{len(thing.data)}</Size></Contents>"
    )


def _iso(when_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when_s))


def _http_date(when_s: float) -> str:
    return email.utils.formatdate(when_s, usegmt=True)


if __name__ == "__main__":
    # A sink in a process of its own, for measuring: its port, and then it serves until it is ended.
    print(FaultServer(sink=True).port, flush=True)
    signal.pause()
