"""One file of a copy that is being brought: made in its whole length, written in any order, then synced."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.layout import ChunkSum, FileEntry, parents_of
from ckpt_core.system.files import NO_DIRECT, Files
from ckpt_core.units import ALIGN_BYTES


def make_folders(directory: Path, entries: Iterable[FileEntry], *, files: Files) -> None:
    """The folders below `directory` that files of these names lie in. Lets `OSError` through."""
    for name in sorted(parents_of(entry.name for entry in entries)):
        files.mkdir(directory / name)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive checksum chunks of a file that are fetched at once."""

    offset: int
    nbytes: int
    chunks: tuple[ChunkSum, ...]


def runs_of(entry: FileEntry, most_bytes: int) -> Iterator[Run]:
    """A file in runs of at most so many bytes; a chunk that is longer is one of its own."""
    offset, size, chunks = 0, 0, list[ChunkSum]()
    for chunk in entry.chunks:
        if chunks and size + chunk.nbytes > most_bytes:
            yield Run(offset, size, tuple(chunks))
            offset, size, chunks = offset + size, 0, []
        chunks.append(chunk)
        size += chunk.nbytes
    if chunks:
        yield Run(offset, size, tuple(chunks))


class Landing:
    """A file that fills. Thread-safe; lets `OSError` through."""

    def __init__(self, directory: Path, entry: FileEntry, *, files: Files) -> None:
        self.entry = entry
        self.path = directory / entry.name
        self._files = files
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._fd: int | None = None
        self._direct = all(chunk.nbytes % ALIGN_BYTES == 0 for chunk in entry.chunks)
        self._left = entry.nbytes

    @staticmethod
    def buffer(nbytes: int) -> memoryview:
        """Memory that direct writes can be made from."""
        return memoryview(mmap.mmap(-1, nbytes))

    def write(self, data: memoryview, offset: int) -> None:
        """Put bytes in their place. Called by any thread."""
        fd = self._open()
        # One at a time: tmpfs has one lock for a file, and whoever waits for it spins.
        with self._turn:
            try:
                self._files.pwrite(fd, data, offset)
            except OSError as exc:
                # Some filesystems accept O_DIRECT at open and refuse the first write.
                if not self._direct or exc.errno not in NO_DIRECT:
                    raise
                self._files.pwrite(self._reopen(), data, offset)
        if not self._direct:
            self._files.start_writeback(fd, offset, len(data))

    def has_got(self, nbytes: int) -> None:
        """So many more bytes are in their place; with the last ones the file is made durable."""
        with self._lock:
            self._left -= nbytes
            whole = self._left == 0
        if whole:
            self.settle()

    def settle(self) -> None:
        """Make it durable and close it, unless that has been done. A file without bytes is made here."""
        fd = self._open() if self._left == 0 else None
        if fd is not None:
            self._left = -1
            self._files.sync(fd)
            self.close()
            if "/" in self.entry.name:
                self._sync_folders()

    def close(self) -> None:
        """Close it, whatever came of it. Idempotent; never raises."""
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            self._files.close(fd)

    def _sync_folders(self) -> None:
        """Names in folders below the directory; its own are for whoever publishes it."""
        for folder in list(self.path.parents)[: self.entry.name.count("/")]:
            self._files.sync_dir(folder)

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = self._create()
                self._files.allocate(self._fd, self.entry.nbytes)
                if os.fstat(self._fd).st_size < self.entry.nbytes:
                    self._files.truncate(self._fd, self.entry.nbytes)
            return self._fd

    def _create(self) -> int:
        if self._direct:
            try:
                return self._files.create(self.path, direct=True)
            except OSError as exc:
                if exc.errno not in NO_DIRECT:
                    raise
                self._direct = False
                if (
                    self.path.exists()
                ):  # Linux makes the name before it finds that O_DIRECT is not to be had
                    return self._files.open_write(self.path)
        return self._files.create(self.path)

    def _reopen(self) -> int:
        with self._lock:
            assert self._fd is not None
            if self._direct:
                fresh = self._files.open_write(self.path)
                # dup2 keeps the number: other threads may be using it right now.
                os.dup2(fresh, self._fd, inheritable=False)
                self._files.close(fresh)
                self._direct = False
            return self._fd
