"""One large file on its way in parts, several at once, by requests of our own.

    sending = PartSending(way)
    try:
        sending.run(cut(blocks, nbytes))
    finally:
        sending.close()

Nothing is copied on the way from the file's own memory to the kernel.
"""

from __future__ import annotations

import html
import http.client
import itertools
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from ckpt_core.levels.far.asking import field
from ckpt_core.levels.far.clients import CONNECT_S
from ckpt_core.levels.far.parts import STREAMS, part_bytes
from ckpt_core.levels.signing import Sign, sum_of

_AGAIN = frozenset({408, 429, 500, 502, 503, 504, 507})
_FIRST_PAUSE_S = 0.1
_END_S = 5.0
"""How long it is tried to tell the store that a file is given up: it finds that out by itself, too."""

Pieces = Sequence[memoryview]


class SendFailed(OSError):
    """What a request ended with; the text is for `causes.away`, and for nobody else."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Way:
    """Where a file goes, and how requests are signed.

    Attributes:
        home: scheme, host and port of the store.
        place: path of the object there, quoted.
        sign: method, URL and what `vouch` gave -> the headers of a request.
        vouch: what the head of a part says of its body.
        request_s: longest time that one request takes, and after which none is repeated.
    """

    home: str
    place: str
    sign: Sign
    vouch: Callable[[Pieces], str]
    request_s: float
    retries: int


def cut(blocks: Iterable[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """The pieces of each part. What is read-only stays as it is for as long as somebody has it."""
    size, done = part_bytes(nbytes), 0
    pieces: list[memoryview] = []
    room = size
    for block in blocks:
        left = block.cast("B") if block.readonly else memoryview(bytes(block))
        del block
        while left:
            pieces.append(left[:room])
            left, taken = left[room:], len(pieces[-1])
            room, done = room - taken, done + taken
            # Invariant: an upload is completed only when this ends well.
            assert done <= nbytes, f"more than the {nbytes} bytes of the file were given"
            if not room:
                yield pieces
                pieces, room = [], size
    assert done == nbytes, f"{done} bytes were given of a file of {nbytes}"
    if pieces:
        yield pieces


class PartSending:
    """One file. Its threads end with it: whoever is told to end does not wait for a store that is silent."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._own, self._mine = threading.local(), threading.current_thread()
        self._open: set[http.client.HTTPConnection] = set()
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="ckpt-parts")

    def run(self, parts: Iterable[Pieces]) -> None:
        """All of it, in an upload of its own. What `parts` raises comes out, and nothing is there.

        Raises:
            SendFailed: likewise.
        """
        try:
            name = field(self._ask("POST", "uploads=")[1], "UploadId")
        except ValueError:
            raise SendFailed("status: 200 without UploadId") from None
        try:
            self.complete(name, parts)
        except BaseException:
            with suppress(SendFailed):
                self._once("DELETE", _upload(name), (), "", timeout_s=_END_S)
            raise

    def complete(
        self,
        name: str,
        parts: Iterable[Pieces],
        is_there: Callable[[int, Pieces], str] | None = None,
    ) -> None:
        """What an upload lacks; then it is the object. Raises as `run`; then what has come stays there.

        Args:
            is_there: number and bytes of a part -> its tag, if the upload has it; "" if it is to be sent.
        """
        try:
            tags = self._all(name, parts, is_there)
            rows = [
                f"<Part><PartNumber>{n}</PartNumber><ETag>{html.escape(tag)}</ETag></Part>"
                for n, tag in enumerate(tags, 1)
            ]
            body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
            _, text = self._ask("POST", _upload(name), [memoryview(body)])
            if "CompleteMultipartUploadResult" not in text:
                # S3 begins its answer before it knows how this ends.
                raise SendFailed(f"status: 500 {text}", 500)
        except BaseException:
            self._break_off()
            raise

    def close(self) -> None:
        """End its threads and connections."""
        self._threads.shutdown()
        for connection in self._open:
            connection.close()

    # -- inside ----------------------------------------------------------------------------------

    def _all(
        self, name: str, parts: Iterable[Pieces], is_there: Callable[[int, Pieces], str] | None
    ) -> list[str]:
        tags: list[str] = []
        coming: deque[Future[str]] = deque()
        left = iter(parts)
        for number in itertools.count(1):
            if len(coming) == STREAMS:
                tags.append(coming.popleft().result())
            pieces = next(left, None)
            if pieces is None:
                return tags + [future.result() for future in coming]
            coming.append(self._threads.submit(self._part, name, number, pieces, is_there))
        raise AssertionError

    def _part(
        self, name: str, number: int, pieces: Pieces, is_there: Callable[[int, Pieces], str] | None
    ) -> str:
        tag = is_there(number, pieces) if is_there is not None else ""
        if tag:
            return tag
        query = f"partNumber={number}&{_upload(name)}"
        told = self._ask("PUT", query, pieces, self._way.vouch(pieces))[0]
        if "etag" not in told:
            raise SendFailed("status: 200 without ETag", 200)
        return told["etag"]

    def _ask(
        self, method: str, query: str, pieces: Pieces = (), content: str = ""
    ) -> tuple[Mapping[str, str], str]:
        """The headers and the text of an answer; asked again where that may help. Raises SendFailed."""
        request_s = self._way.request_s
        deadline, pause_s = time.monotonic() + request_s, _FIRST_PAUSE_S
        for again in itertools.count():
            try:
                return self._once(method, query, pieces, content, timeout_s=request_s)
            except SendFailed as exc:
                hopeless = exc.status and exc.status not in _AGAIN
                late = time.monotonic() + pause_s > deadline
                if hopeless or again == self._way.retries or late or self._over.wait(pause_s):
                    raise
                pause_s *= 2
        raise AssertionError

    def _once(
        self, method: str, query: str, pieces: Pieces, content: str, *, timeout_s: float
    ) -> tuple[Mapping[str, str], str]:
        target = f"{self._way.place}?{query}"
        try:
            headers = self._way.sign(method, self._way.home + target, content or sum_of(pieces))
            connection = self._connection(timeout_s)
            signs_host = "host" in headers
            connection.putrequest(method, target, skip_host=signs_host, skip_accept_encoding=True)
            for name, text in headers.items():
                connection.putheader(name, text)
            connection.putheader("content-length", str(sum(map(len, pieces))))
            connection.endheaders()
            for piece in pieces:
                connection.send(piece)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as exc:
            if (broken := getattr(self._own, "connection", None)) is not None:
                broken.close()
            cut_off = "" if isinstance(exc, TimeoutError) else " ConnectionReset"
            raise SendFailed(f"{type(exc).__name__} {exc}{cut_off}") from None
        if answer.status >= 300:
            raise SendFailed(f"status: {answer.status} {text}", answer.status)
        return {name.lower(): text for name, text in answer.getheaders()}, text

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Of this thread."""
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None:
            found = self._own.connection = self._connected(timeout_s)
            self._open.add(found)
        if found.sock is None:
            if self._over.is_set() and threading.current_thread() is not self._mine:
                raise SendFailed("given up")
            found.timeout = min(timeout_s, CONNECT_S)
            found.connect()
            if self._over.is_set() and threading.current_thread() is not self._mine:
                # What was not connected could not be cut.
                raise SendFailed("given up")
        assert found.sock is not None
        found.sock.settimeout(timeout_s)
        return found

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        home = urlsplit(self._way.home)
        host = str(home.hostname)
        if home.scheme == "http":
            return http.client.HTTPConnection(host, home.port, timeout=timeout_s)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, home.port, timeout=timeout_s, context=context)

    def _break_off(self) -> None:
        """Have the threads end: what they wait for is cut."""
        self._over.set()
        for connection in self._open - {getattr(self._own, "connection", None)}:
            sock = connection.sock
            with suppress(OSError):
                if sock is not None:
                    # Danger: TLS's own would have a thread that is sending go on in plain text.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _upload(name: str) -> str:
    return f"uploadId={quote(name, safe='')}"
