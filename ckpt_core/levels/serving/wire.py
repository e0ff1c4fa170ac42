"""One connection of a peer's server: HTTP/1.1, as much of it as an object store's client uses, within limits.

A client that sends too much or too little, or nothing for too long, is cut off: `Gone`.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qsl, unquote

MOST_HEADER_BYTES = 16 * 1024
MOST_BODY_BYTES = 5 << 30
"""Of one request, as in S3; an object in parts may be larger."""

MOST_TEXT_BYTES = 8 << 20
"""Of a body that is a list of keys or parts."""

STRANGER_S = 10.0
"""How long somebody who has not shown the token may take for a request, the body and the idle time before
the first one included."""

_WAIT_S = 60.0
_BUFFER_BYTES = 1 << 20
_DRAIN_BYTES = 64 * 1024
_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.1")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_TEXTS = {
    **{200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified"},
    **{400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"},
    **{411: "Length Required", 412: "Precondition Failed", 413: "Too Large", 416: "Bad Range"},
    **{500: "Internal Server Error", 501: "Not Implemented", 503: "Slow Down"},
    507: "Insufficient Storage",
}


class Gone(Exception):
    """The other side has left, or is not to be listened to any more."""


class Refusal(Exception):
    """What a request is answered that is not done: a status, and S3's word for it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Request:
    """One request, without its body.

    Attributes:
        path, query: quoted, as they came.
        headers: by names in lower case.
        nbytes: length of the body.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    nbytes: int

    @property
    def names(self) -> tuple[str, str]:
        """Bucket and key."""
        bucket, _, key = unquote(self.path, errors="surrogateescape")[1:].partition("/")
        return bucket, key

    @property
    def fields(self) -> dict[str, str]:
        """Those of the query."""
        return dict(parse_qsl(self.query, keep_blank_values=True, errors="surrogateescape"))


@dataclass(frozen=True)
class Answer:
    """What a request is answered.

    Attributes:
        content: the body; or a file of ours, from an offset on, so many bytes, which is closed afterwards.
        nbytes: what Content-Length says where there is no body (HEAD).
    """

    status: int = 200
    content: bytes | FilePart = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    nbytes: int | None = None


@dataclass(frozen=True)
class FilePart:
    """Bytes of an open file that the kernel sends."""

    fd: int
    offset: int
    nbytes: int


class Connection:
    """A socket that has been accepted. One thread uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = b""
        self._left = 0
        self._buffer: memoryview | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Invariant: a number from the first byte of a request until it is known to be signed.
        self._until: float | None = time.monotonic() + STRANGER_S

    def trust(self) -> None:
        """The request is signed: its body may take longer, and the next one may be waited for."""
        self._until = None
        self._wait_at_most(_WAIT_S)

    def request(self) -> Request | None:
        """The next one; None where the other side ends.

        Raises:
            Gone: it does not come in time, or is too long.
            Refusal: it is no request that we understand; nothing can come after it.
        """
        head = self._head()
        if head is None:
            return None
        line, *rows = head.decode("latin-1").split("\r\n")
        asked = _LINE.fullmatch(line)
        if asked is None:
            raise Refusal(400, "BadRequest")
        headers: dict[str, str] = {}
        for row in rows:
            found = _HEADER.fullmatch(row)
            # Twice the same one: the one that is signed might not be the one that is acted on.
            if found is None or found[1].lower() in headers:
                raise Refusal(400, "BadRequest")
            headers[found[1].lower()] = found[2]
        path, _, query = asked[2].partition("?")
        self._left = _length(headers)
        if headers.get("expect", "").lower() == "100-continue":
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return Request(asked[1], path, query, headers, self._left)

    def body(self) -> Iterator[memoryview]:
        """What has not been read of the body, in pieces that are used before the next one is asked for.

        Raises:
            Gone: it does not come whole.
        """
        if self._buffer is None and self._left:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        while self._left:
            if self._ahead:
                piece = memoryview(self._ahead)[: self._left]
                self._ahead = self._ahead[len(piece) :]
            else:
                assert self._buffer is not None
                got = self._receive_into(self._buffer[: self._left])
                piece = self._buffer[:got]
            self._left -= len(piece)
            yield piece

    def text(self) -> bytes:
        """A body that is a list."""
        if self._left > MOST_TEXT_BYTES:
            raise Refusal(413, "EntityTooLarge")
        return b"".join(map(bytes, self.body()))

    def drain(self, *, trusted: bool) -> None:
        """Read on to the end of the body, so that the answer is heard; a stranger's only when it is short,
        and comes within the `STRANGER_S` of its request.

        Raises:
            Gone: it is not.
        """
        if not trusted and self._left > _DRAIN_BYTES:
            raise Gone
        for _ in self.body():
            pass

    def answer(self, answer: Answer, *, close: bool = False, silent: bool = False) -> None:
        """Send it; `silent`: without its body. Raises Gone."""
        content = answer.content
        length = content.nbytes if isinstance(content, FilePart) else len(content)
        if answer.nbytes is not None:
            length = answer.nbytes
        lines = [f"HTTP/1.1 {answer.status} {_TEXTS.get(answer.status, 'X')}"]
        headers = {"Content-Length": str(length), "Date": formatdate(usegmt=True)} | dict(
            answer.headers
        )
        if answer.status in (204, 304):
            del headers["Content-Length"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, *(["Connection: close"] if close else []), "", ""]).encode(
            "latin-1"
        )
        if isinstance(content, FilePart):
            self._send(head, socket.MSG_MORE if content.nbytes else 0)
            self._send_file(content)
        else:
            self._send(head if silent else head + content)

    # -- inside ----------------------------------------------------------------------------------

    def _head(self) -> bytes | None:
        data = self._ahead
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MOST_HEADER_BYTES:
                raise Gone
            if data:
                self._begin()
            fresh = self._receive()
            if not fresh:
                return None
            data += fresh
        self._begin()
        if end > MOST_HEADER_BYTES:
            raise Gone
        self._ahead = data[end + 4 :]
        return data[:end]

    def _begin(self) -> None:
        """A request has begun: whoever sends it has so long to show the token, and no longer."""
        if self._until is None:
            self._until = time.monotonic() + STRANGER_S

    def _wait_at_most(self, seconds: float) -> None:
        """For the next bytes, or for room to send some; the kernel sees to it."""
        text = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, text)

    def _be_in_time(self) -> None:
        """What comes from a stranger has what is left of its time, and not as much again for each byte."""
        if self._until is None:
            return
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise Gone
        self._wait_at_most(max(left_s, 0.001))  # 0 would be for ever

    def _receive(self) -> bytes:
        self._be_in_time()
        try:
            return self._sock.recv(MOST_HEADER_BYTES)
        except OSError:
            raise Gone from None

    def _receive_into(self, buffer: memoryview) -> int:
        self._be_in_time()
        try:
            # As much as there is room for: a piece for each packet costs a call or two of each kind.
            got = self._sock.recv_into(buffer, flags=socket.MSG_WAITALL)
        except OSError:
            raise Gone from None
        if not got:
            raise Gone
        return got

    def _send(self, data: bytes, flags: int = 0) -> None:
        try:
            self._sock.sendall(data, flags)
        except OSError:
            raise Gone from None

    def _send_file(self, part: FilePart) -> None:
        offset, left = part.offset, part.nbytes
        while left:
            try:
                # Nothing is copied but by the kernel.
                sent = os.sendfile(self._sock.fileno(), part.fd, offset, left)
            except OSError:
                raise Gone from None
            if not sent:
                raise Gone  # the file is shorter than it was
            offset, left = offset + sent, left - sent


def _length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise Refusal(501, "NotImplemented")
    text = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise Refusal(400, "BadRequest")
    if int(text) > MOST_BODY_BYTES:
        raise Refusal(413, "EntityTooLarge")
    return int(text)
