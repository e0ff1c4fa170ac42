"""`PeerServer`: listens where it is told to, and nowhere else; a thread for each connection.

with PeerServer(folder, keys, Address("10.0.0.5", 7070)) as server:
    stop.wait()
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Self

from ckpt_core.levels.serving.allowing import check_allowed
from ckpt_core.levels.serving.answering import Desk, refused
from ckpt_core.levels.serving.binding import Address, bound
from ckpt_core.levels.serving.tree import Tree
from ckpt_core.levels.serving.wire import Connection, FilePart, Gone, Refusal
from ckpt_core.levels.tokens import Keys
from ckpt_core.system.files import Files, advice

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
"""At once. A newcomer that finds all taken gets the place of the oldest that has not shown the token."""

_WAITING = 128
_END_S = 5.0
_LEAVES_S = 1.0
_SAID_AGAIN_S = 60.0


class PeerServer:
    """Serves from construction until `close`.

    Args:
        folder: where objects are kept; made if it is not there.
        address: of this machine.

    Attributes:
        address: with the port that the system chose, where 0 was asked for.
        changed_s: when somebody last changed something here, or read a part of something, on the monotonic
            clock; 0: nobody has.

    Raises:
        ConfigError: the address is none of this machine's, or is taken.
        RootBusy: another server, or a job, has the folder.
        PersistError: it cannot be made or locked.
    """

    def __init__(
        self,
        folder: Path,
        keys: Keys,
        address: Address,
        *,
        files: Files | None = None,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self._files = files or Files()
        self._keys, self._most = keys, most_connections
        self.changed_s = 0.0
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._proved: set[socket.socket] = set()
        self._busy: set[socket.socket] = set()
        self._ends = False
        self._said: dict[str, float] = {}
        self._listening = bound(address)
        try:
            self.address = Address(address.host, self._listening.getsockname()[1])
            self._tree = Tree(folder, files=self._files)
        except BaseException:
            self._listening.close()
            raise
        self._desk = Desk(self._tree, keys, files=self._files)
        self._listening.listen(_WAITING)
        self._accepting = threading.Thread(target=self._accept, name="ckpt-serve", daemon=True)
        self._accepting.start()

    def show(self, name: str, folder: Path) -> None:
        """Let another directory be read, too: see `Tree.show`."""
        self._tree.show(name, folder)

    def close(self) -> None:
        """Take no further request, let those that are being answered end, for seconds. Idempotent."""
        with self._lock:
            self._ends = True
            threads = dict(self._open)
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._accepting.join()
        self._listening.close()
        deadline = time.monotonic() + _END_S
        for sock, thread in threads.items():
            if sock in self._busy:
                thread.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads.values():
            thread.join(max(1.0, deadline - time.monotonic()))
        self._desk.close()
        self._tree.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                if self._ends:
                    return
                time.sleep(0.05)  # too many open files: those that there are will end
                continue
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="ckpt-served", daemon=True
            )
            if not self._admit(sock, thread):
                sock.close()
                continue
            try:
                thread.start()
            except RuntimeError:  # no threads are left: those that there are will end
                del self._open[sock]
                sock.close()

    def _admit(self, sock: socket.socket, thread: threading.Thread) -> bool:
        """Give a newcomer a place; strangers cannot keep one from a holder of the token."""
        leaving = None
        with self._lock:
            if self._ends:
                return False
            if len(self._open) >= self._most:
                oldest = next((one for one in self._open if one not in self._proved), None)
                if oldest is None:
                    return False
                leaving = self._open.pop(oldest)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
            self._open[sock] = thread
        if leaving is not None:
            # So that whoever comes faster than others can leave does not add up threads.
            leaving.join(_LEAVES_S)
        return True

    def _prove(self, sock: socket.socket) -> None:
        with self._lock:
            if sock not in self._open:
                raise Gone  # its place was given away just now
            self._proved.add(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            peer = sock.getpeername()[0]
            connection = Connection(sock)
            while not self._ends and self._one(sock, connection, str(peer)):
                pass
        except (Gone, OSError):
            pass
        finally:
            with self._lock:
                self._open.pop(sock, None)
                self._proved.discard(sock)
                self._busy.discard(sock)
            sock.close()

    def _one(self, sock: socket.socket, connection: Connection, peer: str) -> bool:
        """Answer one request; whether another one may follow."""
        trusted = False
        try:
            request = connection.request()
            if request is None:
                return False
            check_allowed(request, self._keys)
            self._prove(sock)
            trusted = True
            connection.trust()
            self._busy.add(sock)
            answer = self._desk.answer(request, connection)
            if request.method not in ("GET", "HEAD") or "range" in request.headers:
                # Or is bringing it somewhere else; who only looks whether something is there does not count.
                self.changed_s = time.monotonic()
        except (Gone, OSError):
            raise
        except Exception as exc:
            refusal = exc if isinstance(exc, Refusal) else _unexpected(exc)
            self._tell(refusal, peer)
            connection.drain(trusted=trusted)
            answer = refused(refusal)
        finally:
            self._busy.discard(sock)
        is_head = trusted and request is not None and request.method == "HEAD"
        try:
            connection.answer(answer, close=not trusted, silent=is_head)
        finally:
            if isinstance(answer.content, FilePart):
                self._files.close(answer.content.fd)
        return trusted

    def _tell(self, refusal: Refusal, peer: str) -> None:
        """What somebody has to look at, once a minute; never what was asked with."""
        what = refusal.code if refusal.status in (403, 500, 507) else ""
        now = time.monotonic()
        key = f"{peer} {what}"
        if not what or now < self._said.get(key, float("-inf")) + _SAID_AGAIN_S:
            return
        if len(self._said) > 1000:
            self._said.clear()
        self._said[key] = now
        cause = refusal.__cause__
        if isinstance(cause, OSError):
            logger.warning("%s: %s. %s", self._tree.folder, cause.strerror or cause, advice(cause))
        elif cause is not None:
            # Where, and not what the error says: that may be what was asked with.
            where = traceback.extract_tb(cause.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            logger.error("%s was refused: unexpected %s in %s", peer, type(cause).__name__, place)
        else:
            logger.warning("%s was refused: %s", peer, what)


def _unexpected(error: Exception) -> Refusal:
    """A mistake of ours: it costs this request, and neither the connection nor the server."""
    refusal = Refusal(500, "InternalError")
    refusal.__cause__ = error
    return refusal
