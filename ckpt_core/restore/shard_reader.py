"""One open file and the ways to read it: mapped, from the page cache, past it, or through it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from ckpt_core.system.files import NO_DIRECT, Files
from ckpt_core.system.pages import address_of
from ckpt_core.units import ALIGN_BYTES

_IOV_MAX = 1024


_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None)
_mincore, _madvise = _libc.mincore, _libc.madvise
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Truncated(Exception):
    """The file ends before the bytes that were asked for. Never leaves this package."""


class ShardReader:
    """Reads one file for several threads. Opened by the first use; `close` is idempotent, and never raises.

    Args:
        nbytes: its length in the manifest.
        buffered: read through the page cache alone.
    """

    def __init__(self, path: Path, *, nbytes: int, files: Files, buffered: bool = False) -> None:
        self.path = path
        self._nbytes = nbytes
        self._files = files
        self._buffered = buffered
        self._opening = threading.Lock()
        self._fd: int | None = None
        self._direct: int | None = None
        self._mapping: mmap.mmap | None = None
        self._address = 0

    def open(self) -> None:
        """Make the file ready for reading.

        Raises:
            Truncated: it is no regular file, or not as long as it was when it was checked.
            OSError: it cannot be opened.
        """
        with self._opening:
            if self._fd is not None:
                return
            fd = self._files.open_read(self.path)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or found.st_size != self._nbytes:
                    raise Truncated(f"{found.st_size} of {self._nbytes} bytes are there")
                self._direct = None if self._buffered else self._open_direct()
            except BaseException:
                self._files.close(fd)
                raise
            self._fd = fd

    def close(self) -> None:
        """Close the descriptors. Called once nobody reads any more."""
        with self._opening:
            for fd in (self._fd, self._direct):
                if fd is not None:
                    with contextlib.suppress(OSError):  # whatever it says, all has been read
                        self._files.close(fd)
            self._fd = self._direct = None

    def unmap(self) -> None:
        """Let go of the mapping; takes milliseconds for a large file. Called after `close`."""
        self._mapping = None

    def is_cached(self, offset: int, probe: memoryview) -> bool:
        """Whether the page at `offset` is in the page cache; `probe` is overwritten.

        One page alone is asked for: a miss makes the kernel read what was asked for into the cache,
        and the cold way does not use the cache.
        """
        assert self._fd is not None
        wanted = min(ALIGN_BYTES, self._nbytes - offset)
        return self._files.preadv_cached(self._fd, [probe[:wanted]], offset) == wanted

    def read_cached(self, views: Sequence[memoryview], offset: int) -> bool:
        """Fill `views` from the page cache; False, with anything in them, when it does not hold all."""
        assert self._fd is not None
        for index in range(0, len(views), _IOV_MAX):
            batch = views[index : index + _IOV_MAX]
            wanted = sum(map(len, batch))
            if self._files.preadv_cached(self._fd, batch, offset) != wanted:
                return False
            offset += wanted
        return True

    def is_resident(self, offset: int, nbytes: int) -> bool:
        """Whether all of it is in the page cache, mapped and ready to be read through `mapped`.

        Populating reports what a plain access would answer with SIGBUS, so it comes first.
        """
        with self._opening:
            assert self._fd is not None
            if self._mapping is None:
                try:
                    self._mapping = self._files.map_private(self._fd, self._nbytes)
                except OSError:  # not every filesystem can
                    return False
                self._address = address_of(self._mapping)
        pages = -(-nbytes // ALIGN_BYTES)
        found = (ctypes.c_ubyte * pages)()
        if _mincore(self._address + offset, nbytes, found) != 0:
            return False
        if bytes(found).count(1) != pages:
            return False
        # Not mmap.madvise, which keeps the GIL meanwhile. Fails before Linux 5.14, and where a page
        # cannot be read.
        return int(_madvise(self._address + offset, nbytes, _MADV_POPULATE_READ)) == 0

    def mapped(self, start: int, stop: int) -> memoryview:
        """Bytes start..stop where `is_resident` said yes; not to be written."""
        assert self._mapping is not None
        return memoryview(self._mapping)[start:stop]

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views` through the page cache.

        Raises:
            Truncated: the file ends before.
            OSError: the bytes cannot be read.
        """
        assert self._fd is not None
        for index in range(0, len(views), _IOV_MAX):
            batch = list(views[index : index + _IOV_MAX])
            while batch:
                got = self._files.preadv(self._fd, batch, offset)
                if got == 0:
                    raise Truncated(f"the file ends at byte {offset}")
                offset += got
                batch = _behind(batch, got)

    def can_read_direct(self, offset: int, nbytes: int) -> bool:
        """Whether a read past the page cache is possible, as far as is known."""
        return self._direct is not None and offset % ALIGN_BYTES == 0 and nbytes % ALIGN_BYTES == 0

    def read_direct(self, buffer: memoryview, offset: int) -> None:
        """Fill a page-aligned buffer past the page cache; falls back to `read` where that fails.

        Raises: as `read`.
        """
        assert self._direct is not None
        got = 0
        try:
            got = self._files.preadv(self._direct, [buffer], offset)
        except OSError as exc:
            # Some filesystems take O_DIRECT at open and refuse it at the first read.
            if exc.errno not in NO_DIRECT:
                raise
        if got < len(buffer):
            # A short read leaves an offset that is not aligned any more.
            self.read([buffer[got:]], offset + got)

    def _open_direct(self) -> int | None:
        try:
            return self._files.open_read(self.path, direct=True)
        except OSError as exc:
            if exc.errno not in NO_DIRECT:
                raise
            return None


def _behind(batch: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `batch` after its first `done` bytes."""
    for index, view in enumerate(batch):
        if done < len(view):
            return [view[done:], *batch[index + 1 :]]
        done -= len(view)
    return []
