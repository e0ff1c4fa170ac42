"""One writer per root: an open-file-description lock on `.lock`.

Such a lock belongs to the open file: no other open or close of `.lock` in this process touches it, and
the kernel drops it with the last copy of the descriptor. A child made by fork has such a copy, so it closes
it at once: the lock ends with the process that took it, however that ends, and nobody inherits it.

Where there are none (a kernel before 3.15, some filesystems), a POSIX record lock stands in: it belongs to
the process, no child gets it, and it is dropped when the process closes *any* descriptor of that file;
`held` takes it again. Both kinds keep each other out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from ckpt_core.errors import RootBusy
from ckpt_core.store.failures import mapped
from ckpt_core.store.names import LOCK
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)

_BUSY = (errno.EACCES, errno.EAGAIN)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EBADF)
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What a kernel or a filesystem without open-file-description locks answers."""

_OWNER_BYTES = 4096
_OWNER_KEYS = ("pid", "host", "since", "command")

_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, process."""

_RECORD = (
    "%s: no open-file-description lock is to be had here (%s); a POSIX record lock stands in. Danger: code "
    "of this process that opens and closes that file drops it, until the next save takes it again"
)

_ORPHAN = (
    ". That process is gone: a child that it made, by other means than os.fork, still has its lock: "
    "`fuser {}` names it"
)

_held: dict[tuple[int, int, int], RootLock] = {}
"""Locks of this process by (pid, device, inode of the root). The pid makes a forked child forget
them; `dict.setdefault` is atomic, so no mutex can be left locked by a fork."""

_opened: weakref.WeakSet[RootLock] = weakref.WeakSet()
"""Locks of this process, for the children that it may fork."""


class RootLock:
    """The right to write to a root; held by at most one `RootLock` of one process at a time."""

    def __init__(self, root: Path, *, files: Files | None = None) -> None:
        self.root = root
        self.path = root / LOCK
        self._files = files or Files()
        self._fd: int | None = None
        self._key: tuple[int, int, int] | None = None
        self._since = ""
        self.is_record = False
        """Whether a record lock had to do."""

    def acquire(self) -> None:
        """Take the lock, or fail at once: never waits. The root exists.

        Raises:
            RootBusy: another process, or another `RootLock` of this one, holds it.
            PersistError: the lock file cannot be made or locked.
        """
        mine = self._fd is not None
        with mapped("lock the checkpoint root", path=self.root):
            try:
                self._claim()
                _opened.add(self)
                self._lock_file()
            except BaseException:
                if not mine:
                    self.release()
                raise
        self._since = _now()
        self._write_owner()

    def owner(self) -> dict[str, Any]:
        """What `.lock` says of its holder; {} when it says nothing. For other ranks, to find the root by."""
        assert self._fd is not None
        with contextlib.suppress(OSError):
            # From another machine, perhaps: a client of NFS sends what was written before it asks for a lock.
            self._take(self._fd)
        return _read_owner(self._fd)

    def is_signed(self) -> bool:
        """Whether the lock file that has the name now says that this lock is its holder, or was."""
        owner = owner_of(self.root)
        mine = (os.getpid(), socket.gethostname(), self._since)
        return (owner.get("pid"), owner.get("host"), owner.get("since")) == mine

    def held(self) -> bool:
        """Whether the lock is still ours and `.lock` is still the file that we locked.

        Takes the lock again, which is free while we have it and heals a record lock that was dropped
        because other code of this process opened and closed the file.

        Raises:
            OSError: that cannot be told now, as when a server is away. The lock is kept.
        """
        # Another thread may release it meanwhile: that is seen by what the descriptor leads to then.
        fd, key = self._fd, self._key
        if fd is None or key is None or key[0] != os.getpid():
            return False
        lost: tuple[int, ...] = _GONE
        try:
            if not os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False)):
                return False
            lost = (*_GONE, *_BUSY)
            self._take(fd)
        except OSError as exc:
            if exc.errno not in lost:
                raise
            return False
        return True

    def release(self) -> None:
        """Give the lock back. Idempotent; changes nothing on storage."""
        # Looked at once: a signal handler that releases it may come between any two lines.
        fd, key = self._fd, self._key
        if fd is not None and (key is None or key[0] == os.getpid()):
            # Order matters: an interrupt may lose the descriptor as it is closed, and the lock with it.
            with contextlib.suppress(OSError):
                self._files.unlock(fd)
        if key is not None and _held.get(key) is self:
            _held.pop(key, None)
        self._key = None
        self._close()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _claim(self) -> None:
        found = os.stat(self.root)
        key = (os.getpid(), found.st_dev, found.st_ino)
        if self._fd is None:
            self._key = (
                key  # first: an interrupt must not leave a claim that `release` does not know
            )
        other = _held.setdefault(key, self)
        if other is self and self._fd is None:
            return
        # A root that was removed leaves its inode number to others: its lock is void.
        if other is not self and other._fd is not None:
            with contextlib.suppress(OSError):  # that cannot be told: it counts as held
                if not other.held():
                    _held[key] = self
                    return
        raise RootBusy(
            f"{self.root} is already open for writing in this process (pid {os.getpid()}, "
            f"since {other._since}): use that Checkpointer, or close() it first. One that no name refers to "
            "any more, as after an error in a function or a notebook cell, is open until the process ends: "
            "restart it, and use `with`",
            path=self.root,
        )

    def _lock_file(self) -> None:
        while True:
            # Danger: kept before it is locked, or a child forked in between would keep the lock for good.
            self._fd = self._open()
            try:
                self._take(self._fd)
            except OSError as exc:
                if exc.errno in _BUSY:
                    raise self._busy(self._fd) from exc
                raise
            if self._is_path(self._fd):
                return
            # The file was removed between our open and our lock: lock the new one.
            self._close()

    def _take(self, fd: int) -> None:
        """Lock the file, which is a no-op while this lock has it."""
        if not self.is_record:
            try:
                self._files.lock(fd)
                return
            except OSError as exc:
                if exc.errno not in _UNKNOWN:
                    raise
                reason = exc.strerror
        self._files.lock_record(fd)
        if not self.is_record:
            self.is_record = True
            logger.warning(_RECORD, self.path, reason)

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._files.close(fd)

    def _open(self) -> int:
        while True:
            try:
                return self._files.create(self.path)
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):
                    return self._files.open_write(self.path)

    def _is_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _write_owner(self) -> None:
        fd = self._fd
        assert fd is not None
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": self._since,
            "command": " ".join(sys.orig_argv)[:1000],
        }
        try:
            self._files.truncate(fd, 0)
            self._files.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)
        except OSError as exc:
            # The text only helps a person; a full disk must not keep a run from restoring.
            logger.warning("could not note the owner in %s: %s", self.path, exc)

    def _busy(self, fd: int) -> RootBusy:
        owner = _read_owner(fd)
        left = "" if _may_live(owner) else _ORPHAN.format(self.path)
        return RootBusy(
            f"{self.root} is open for writing by pid {owner.get('pid', 'unknown')} on host "
            f"{owner.get('host', 'unknown')} since {owner.get('since', 'unknown')} "
            f"({owner.get('command', 'unknown command')}). Only one process writes to a root: wait "
            f"for it, stop it (its lock goes with it), or use another root. Reading needs no lock{left}",
            path=self.root,
        )


def owner_of(root: Path) -> dict[str, Any]:
    """What the lock file of a root says of its holder; {} when there is none.

    Never called by the holder of that file: closing it here would drop a record lock of this process.
    """
    try:
        # Without blocking: somebody may have put a named pipe there.
        fd = os.open(root / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        return _read_owner(fd)
    finally:
        os.close(fd)


def writer_of(root: Path) -> dict[str, Any] | None:
    """Who holds the lock of a root, as far as it is known; None when nobody does. Asks, and does not take it.

    Called by tools that look at a root; never by the holder, as `owner_of`.
    """
    try:
        fd = Files().open_read(root / LOCK)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return None
        owner = _read_owner(fd)
        known = {key: owner[key] for key in _OWNER_KEYS if key in owner}
        # The kernel names the holder of a record lock alone; of other locks it says -1.
        return {**known, "pid": pid if pid > 0 else known.get("pid")}
    except OSError:
        return None
    finally:
        os.close(fd)


def _may_live(owner: dict[str, Any]) -> bool:
    """Whether the process that an owner's text names may be alive; True where that cannot be told."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _read_owner(fd: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        owner = json.loads(os.pread(fd, _OWNER_BYTES, 0))
        if isinstance(owner, dict):
            return owner
    return {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _after_fork() -> None:
    """In a child: give up the copies of the parent's locks, which stay the parent's."""
    _held.clear()
    for lock in list(_opened):
        lock._close()


os.register_at_fork(after_in_child=_after_fork)
