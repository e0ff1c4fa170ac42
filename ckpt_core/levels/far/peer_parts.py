"""A large file on its way to a peer: in parts, several at once, each vouched for by a key of the job's token.

Idea: the client of object stores signs a SHA-256 of each part, and the peer computes it again: these two are
most of what a byte costs on its way. A peer takes an AES-GMAC as well. Nothing is copied on the way from the
file's own memory to the kernel.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import itertools
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import urlsplit

from ckpt_core.levels.far.clients import CONNECT_S, away, endpoint, peer_path, peer_settings
from ckpt_core.levels.far.door import Away
from ckpt_core.levels.far.leftovers import signed
from ckpt_core.levels.far.parts import STREAMS, part_bytes
from ckpt_core.levels.signing import BodyMac

_AGAIN = frozenset({500, 502, 503, 504, 507})
_CREDENTIALS = re.compile("InvalidAccessKeyId|SignatureDoesNotMatch|RequestTimeTooSkewed")
_FIRST_PAUSE_S = 0.1
_END_S = 5.0
"""How long it is tried to tell the peer that a file is given up: it finds that out by itself, too."""


class _Failed(OSError):
    """What a request ended with; the text is for `away`, and for nobody else."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_unknown(self) -> bool:
        """Whether the peer may not know what the sum of a body is; of the token nothing is wrong."""
        return self.status == 501 or (self.status == 403 and not _CREDENTIALS.search(str(self)))


class PeerParts:
    """Sends to one peer. Thread-safe."""

    def __init__(self, url: str, *, request_s: float, retries: int) -> None:
        self._url, self._request_s, self._retries = url, request_s, retries
        self._refused = False

    def takes(self, nbytes: int) -> bool:
        """Whether a file of so many bytes is to go this way."""
        return BodyMac.is_there() and nbytes > part_bytes(nbytes) and not self._refused

    def put(self, key: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        """Write an object. What `blocks` raises comes out, and nothing is there.

        Raises:
            Away: it could not be written. A peer that does not know such parts is sent others from then on.
        """
        place = peer_path(self._url, key)
        sending = _Sending(self._url, place, self._request_s, self._retries)
        try:
            sending.run(_cut(blocks, nbytes))
        except _Failed as exc:
            if exc.is_unknown and not self._refused:
                self._refused = True
                text = f"{self._url} takes no AES-GMAC: files are sent another way from now on"
                raise Away(text) from None
            raise away(self._url, f"write {key}", exc) from None
        finally:
            sending.close()


def _cut(blocks: Iterable[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
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


class _Sending:
    """One file. Its threads end with it: whoever is told to end does not wait for a peer that is silent."""

    def __init__(self, url: str, place: str, request_s: float, retries: int) -> None:
        self._place, self._request_s, self._retries = place, request_s, retries
        self._home = endpoint(url)
        self._settings = peer_settings()
        self._own, self._mine = threading.local(), threading.current_thread()
        self._open: set[http.client.HTTPConnection] = set()
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="ckpt-parts")

    def run(self, parts: Iterator[list[memoryview]]) -> None:
        name = _inner(self._ask("POST", "uploads=")[1], "UploadId")
        try:
            tags = self._all(name, parts)
            rows = [
                f"<Part><PartNumber>{n}</PartNumber><ETag>{html.escape(tag)}</ETag></Part>"
                for n, tag in enumerate(tags, 1)
            ]
            text = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
            self._ask("POST", f"uploadId={name}", [memoryview(text)])
        except BaseException:
            self._break_off()
            with suppress(_Failed):
                self._once("DELETE", f"uploadId={name}", (), "", timeout_s=_END_S)
            raise

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._open:
            connection.close()

    def _all(self, name: str, parts: Iterator[list[memoryview]]) -> list[str]:
        tags: list[str] = []
        coming: deque[Future[str]] = deque()
        for number in itertools.count(1):
            if len(coming) == STREAMS:
                tags.append(coming.popleft().result())
            pieces = next(parts, None)
            if pieces is None:
                return tags + [future.result() for future in coming]
            query = f"partNumber={number}&uploadId={name}"
            coming.append(self._threads.submit(self._part, query, pieces))
        raise AssertionError

    def _part(self, query: str, pieces: Sequence[memoryview]) -> str:
        mac = BodyMac.begin(self._settings["secret_access_key"])
        for piece in pieces:
            mac.update(piece)
        return self._ask("PUT", query, pieces, mac.content())[0]["etag"]

    def _ask(
        self, method: str, query: str, pieces: Sequence[memoryview] = (), content: str = ""
    ) -> tuple[Mapping[str, str], str]:
        """The headers and the text of an answer; asked again where that may help. Raises _Failed."""
        deadline, pause_s = time.monotonic() + self._request_s, _FIRST_PAUSE_S
        for again in itertools.count():
            try:
                return self._once(method, query, pieces, content, timeout_s=self._request_s)
            except _Failed as exc:
                hopeless = exc.status and exc.status not in _AGAIN
                if hopeless or again == self._retries or time.monotonic() + pause_s > deadline:
                    raise
                if self._over.wait(pause_s):
                    raise
                pause_s *= 2
        raise AssertionError

    def _once(
        self,
        method: str,
        query: str,
        pieces: Sequence[memoryview],
        content: str,
        *,
        timeout_s: float,
    ) -> tuple[Mapping[str, str], str]:
        content = content or hashlib.sha256(b"".join(pieces)).hexdigest()
        target, now = f"{self._place}?{query}", datetime.now(UTC)
        url = self._home + target
        headers = signed(method, url, self._settings, when=now, content=content)
        try:
            connection = self._connection(timeout_s)
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, text in headers.items():
                connection.putheader(name, text)
            connection.putheader("content-length", str(sum(map(len, pieces))))
            connection.endheaders()
            for piece in pieces:
                connection.send(piece)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as exc:
            self._own.connection.close()
            cut = "" if isinstance(exc, TimeoutError) else " ConnectionReset"
            raise _Failed(f"{type(exc).__name__} {exc}{cut}") from None
        if answer.status >= 300:
            raise _Failed(f"status: {answer.status} {text}", answer.status)
        return {name.lower(): text for name, text in answer.getheaders()}, text

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Of this thread."""
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None:
            place = urlsplit(self._home)
            found = http.client.HTTPConnection(str(place.hostname), place.port, timeout=timeout_s)
            self._own.connection = found
            self._open.add(found)
        if found.sock is None:
            if self._over.is_set() and threading.current_thread() is not self._mine:
                raise _Failed("given up")
            found.timeout = min(timeout_s, CONNECT_S)
            found.connect()
        assert found.sock is not None
        found.sock.settimeout(timeout_s)
        return found

    def _break_off(self) -> None:
        """Have the threads end: what they wait for is cut."""
        self._over.set()
        for connection in self._open - {getattr(self._own, "connection", None)}:
            sock = connection.sock
            with suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)


def _inner(text: str, name: str) -> str:
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    if found is None:
        raise _Failed(f"status: 200 without {name}")
    return html.unescape(found[1])
