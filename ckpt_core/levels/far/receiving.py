"""Ranges of objects over plain HTTP by requests of our own: from the socket straight into their place.

    receiver = receiver_of(url, store, request_s=request_s)    None: the client reads all of it
    for block in receiver.blocks(key, offset, nbytes): ...     as far as it comes

Idea: the client of object stores gives each range in memory of its own; to clear that and to copy out of it
takes longer than to receive the bytes. Here they come into memory that is used again, which stays in the
processor's cache until they are hashed and written. Signatures are the client's. What a range that does not
come as it should means is for the client to find out, too: whoever asks has it read the rest.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit

import obstore

from ckpt_core.levels.far.clients import (
    CONNECT_S,
    ERRORS,
    Store,
    endpoint,
    peer_path,
    peer_settings,
    split,
)
from ckpt_core.levels.signing import signed
from ckpt_core.options import PEER
from ckpt_core.system.threads import own_lock

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2 << 20
"""Small enough to stay in a processor's cache from the network to the file. Smaller ones take longer: four
threads have turns at one file, and for each block one of them is woken."""

_AHEAD_BYTES = 4 << 20
"""What may wait in the kernel: a sender that need not wait for us wakes, and is woken, less often."""
_MOST_AHEAD = Path("/proc/sys/net/core/rmem_max")

_PIECE_BYTES, _MOST_HEAD_BYTES = 4096, 64 * 1024
_SIGNED_FOR = timedelta(minutes=15)
_FOR_NOW = frozenset({404, 408, 416, 429})
"""Answers that say nothing of the next request, besides those from 500 on."""

Sign = Callable[[str, str], tuple[str, dict[str, str]]]
"""Key and wanted range -> the URL to ask, and its headers. Secrets: no text of ours holds one."""


class _Otherwise(OSError):
    """An answer that is not just the bytes that were asked for; 0: it is none that is known here."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def receiver_of(url: str, store: Store, *, request_s: float) -> Receiver | None:
    """What receives ranges of what lies under a URL; None where that is not by plain HTTP, or by a proxy.

    Args:
        store: signs.
        request_s: longest time that one range takes.
    """
    scheme = split(url)[0]
    if scheme not in ("s3", PEER) or not endpoint(url).startswith("http://"):
        return None
    if scheme == PEER:
        return Receiver(url, partial(_signed_for_peer, url), request_s=request_s)
    if {"http", "all"} & urllib.request.getproxies_environment().keys():
        return None
    return Receiver(url, partial(_signed_by, store), request_s=request_s)


def _signed_by(store: Store, key: str, wanted: str) -> tuple[str, dict[str, str]]:
    place = obstore.sign(store, "GET", key, _SIGNED_FOR)
    return place, {"host": urlsplit(place).netloc, "range": wanted}


def _signed_for_peer(url: str, key: str, wanted: str) -> tuple[str, dict[str, str]]:
    place = endpoint(url) + peer_path(url, key)
    return place, signed("GET", place, peer_settings(), when=datetime.now(UTC), wanted=wanted)


class Receiver:
    """Keeps its connections for the next ranges. Thread-safe."""

    def __init__(self, url: str, sign: Sign, *, request_s: float) -> None:
        self._url, self._sign, self._request_s = url, sign, request_s
        self._idle: list[socket.socket] = []
        self._is_refused = self._is_closed = False
        self._lock = own_lock()
        # Whoever opens a level to look at one thing need not close it, nor read a range to its end.
        self._open = set[socket.socket]()
        weakref.finalize(self, _close_all, self._open)

    def blocks(self, key: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """A range of an object, in order: each block is to be used before the next. It may end early.

        Raises:
            TimeoutError: it took longer than a request may; what has come is right.
        """
        buffer = memoryview(bytearray(min(BLOCK_BYTES, nbytes)))
        views = (buffer[: min(BLOCK_BYTES, nbytes - at)] for at in range(0, nbytes, BLOCK_BYTES))
        return self._received(key, offset, nbytes, views)

    def fill(self, key: str, buffer: memoryview, offset: int) -> int:
        """The same into a buffer of bytes: how many of them have come. Raises as `blocks`."""
        views = (buffer[at : at + BLOCK_BYTES] for at in range(0, len(buffer), BLOCK_BYTES))
        return sum(map(len, self._received(key, offset, len(buffer), views)))

    def close(self) -> None:
        """Let go of connections; those that are read are closed behind the range. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for sock in idle:
            self._drop(sock)

    # -- inside ----------------------------------------------------------------------------------

    def _received(
        self, key: str, offset: int, nbytes: int, views: Iterable[memoryview]
    ) -> Iterator[memoryview]:
        """What has come of each view: all of it, but where the connection ends."""
        if self._is_refused or not nbytes:
            return
        deadline, sock = time.monotonic() + self._request_s, None
        try:
            place, headers = self._sign(key, f"bytes={offset}-{offset + nbytes - 1}")
            sock = self._connection(place)
            sock.sendall(_request(place, headers))
            ahead, stays = _read_head(sock, offset, nbytes, deadline)
            for view in views:
                while view:
                    come, ahead = _receive(sock, view, ahead, deadline)
                    given_s = time.monotonic()
                    yield come
                    deadline += time.monotonic() - given_s  # what others take is not the store's
                    view = view[len(come) :]
            # What comes unasked would be taken for the next answer.
            sock = None if stays and not ahead and self._keep(sock) else sock
        except TimeoutError:
            raise
        except (OSError, *ERRORS) as exc:
            self._note(exc)
        finally:
            # Also when nobody wants the rest: nothing else can come by this connection.
            if sock is not None:
                self._drop(sock)

    def _connection(self, place: str) -> socket.socket:
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                found = _connected(place, self._request_s)
                self._open.add(found)
                return found
            if _is_still_good(found):
                return found
            self._drop(found)

    def _keep(self, sock: socket.socket) -> bool:
        with self._lock:
            if not self._is_closed:
                self._idle.append(sock)
            return not self._is_closed

    def _drop(self, sock: socket.socket) -> None:
        sock.close()
        self._open.discard(sock)

    def _note(self, error: BaseException) -> None:
        """What went wrong once may go well with the next range; a refusal will not."""
        if isinstance(error, _Otherwise) and error.status not in _FOR_NOW and error.status < 500:
            self._is_refused = True
        # Reason for the name alone: the client's text may hold a signed URL.
        logger.debug("%s: the client reads on behind %s", self._url, type(error).__name__)


def _close_all(sockets: set[socket.socket]) -> None:
    while sockets:
        sockets.pop().close()


def _connected(place: str, request_s: float) -> socket.socket:
    home = urlsplit(place)
    if home.scheme != "http":
        raise _Otherwise(0)
    address = (str(home.hostname), home.port or 80)
    try:
        sock = socket.create_connection(address, timeout=min(CONNECT_S, request_s))
    except TimeoutError:
        raise ConnectionError from None
    if _may_have_ahead():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _AHEAD_BYTES)
    # The kernel's own bound instead of Python's, which would take two calls for each block.
    sock.settimeout(None)
    seconds, part = divmod(max(request_s, 0.001), 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(part * 1e6)))
    return sock


@cache
def _may_have_ahead() -> bool:
    """Whether asking for a buffer gives a larger one than the kernel finds by itself."""
    try:
        return int(_MOST_AHEAD.read_text()) >= _AHEAD_BYTES
    except (OSError, ValueError):
        return False


def _is_still_good(sock: socket.socket) -> bool:
    """Whether the other side has neither ended it nor said anything unasked."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _request(place: str, headers: dict[str, str]) -> bytes:
    home = urlsplit(place)
    target = f"{home.path}?{home.query}" if home.query else home.path
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _read_head(
    sock: socket.socket, offset: int, nbytes: int, deadline: float
) -> tuple[bytes, bool]:
    """Be sure that just the range follows; what has come of it, and whether the connection stays then."""
    head = bytearray()
    while (end := head.find(b"\r\n\r\n")) < 0:
        head += _some(sock, memoryview(bytearray(_PIECE_BYTES)), deadline, flags=0)
        if len(head) > _MOST_HEAD_BYTES:
            raise _Otherwise(0)
    first, *lines = head[:end].decode("latin-1").split("\r\n")
    status = re.fullmatch(r"HTTP/1\.1 (\d{3})( .*)?", first)
    rows = (line.partition(":") for line in lines)
    told = {name.strip().lower(): text.strip() for name, _, text in rows}
    last = offset + nbytes - 1
    if (
        status is None
        or status[1] != "206"
        or not told.get("content-range", "").startswith(f"bytes {offset}-{last}/")
        or told.get("content-length") != str(nbytes)
        or told.keys() & {"transfer-encoding", "content-encoding"}
    ):
        raise _Otherwise(int(status[1]) if status else 0)
    return bytes(head[end + 4 :]), told.get("connection", "keep-alive").lower() == "keep-alive"


def _receive(
    sock: socket.socket, view: memoryview, ahead: bytes, deadline: float
) -> tuple[memoryview, bytes]:
    """Fill a view, or a part of it: what has come, and what is left of what was there already."""
    done = min(len(ahead), len(view))
    view[:done] = ahead[:done]
    if done < len(view):
        done += len(_some(sock, view[done:], deadline, flags=socket.MSG_WAITALL))
    return view[:done], ahead[len(view) :]


def _some(sock: socket.socket, view: memoryview, deadline: float, *, flags: int) -> memoryview:
    try:
        got = sock.recv_into(view, 0, flags)
    except BlockingIOError:
        raise TimeoutError("timed out") from None
    if time.monotonic() > deadline:
        raise TimeoutError("timed out")
    if not got:
        raise ConnectionResetError
    return view[:got]
