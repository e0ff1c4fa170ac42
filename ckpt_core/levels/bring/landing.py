"""One file of a copy that is being brought: made in its whole length, written in any order, then synced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckpt_core.layout import ChunkSum, FileEntry, parents_of
from ckpt_core.system.files import Files
from ckpt_core.system.threads import own_lock


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


@dataclass(frozen=True, slots=True)
class Wrong:
    """A chunk that came with other bytes than were saved: where it lies, and the sum that it has."""

    offset: int
    chunk: ChunkSum
    got: str


class Arriving:
    """What has come of a run: hashed while the bytes are still in the processor's cache.

    Attributes:
        done: bytes that have come.
        wrong: the chunks among them that are not what was saved.
    """

    def __init__(self, run: Run) -> None:
        self.done = 0
        self.wrong: list[Wrong] = []
        self._run = run
        self._chunks = iter(run.chunks)
        self._end = 0
        self._next()

    def take(self, block: memoryview) -> None:
        """The next bytes of the run."""
        while block:
            piece = block[: self._end - self.done]
            block = block[len(piece) :]
            self._hasher.update(piece)
            self.done += len(piece)
            if self.done == self._end:
                self._check()

    def _check(self) -> None:
        got, chunk = self._hasher.hexdigest(), self._chunk
        if chunk.xxh3 not in (None, got):
            self.wrong.append(Wrong(self._run.offset + self._end - chunk.nbytes, chunk, got))
        if self.done < self._run.nbytes:
            self._next()

    def _next(self) -> None:
        self._chunk = next(self._chunks)
        self._end += self._chunk.nbytes
        self._hasher = xxhash.xxh3_64()


class Landing:
    """A file that fills. Thread-safe; lets `OSError` through.

    Its bytes go through the page cache: the restore that asked for them reads them there a moment later.
    """

    def __init__(self, directory: Path, entry: FileEntry, *, files: Files) -> None:
        self.entry = entry
        self.path = directory / entry.name
        self._files = files
        self._lock = own_lock()
        self._turn = own_lock()
        self._fd: int | None = None
        self._left = entry.nbytes

    def write(self, data: memoryview, offset: int) -> None:
        """Put bytes in their place. Called by any thread."""
        fd = self._open()
        # One at a time: tmpfs has one lock for a file, and whoever waits for it spins.
        with self._turn:
            self._files.pwrite(fd, data, offset)

    def has_got(self, run: Run) -> None:
        """All of a run is in its place, and right; with the last one the file is made durable."""
        self._files.start_writeback(self._open(), run.offset, run.nbytes)
        with self._lock:
            self._left -= run.nbytes
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
            with suppress(OSError):  # synced before, or of no use
                self._files.close(fd)

    def _sync_folders(self) -> None:
        """Names in folders below the directory; its own are for whoever publishes it."""
        for folder in list(self.path.parents)[: self.entry.name.count("/")]:
            self._files.sync_dir(folder)

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = self._files.create(self.path)
                self._files.truncate(self._fd, self.entry.nbytes)
            return self._fd
