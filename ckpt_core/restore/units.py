"""What is read and how it is checked: jobs, units of work, and the checksum that runs along.

A job is one file. It is cut into units, runs of whole checksum chunks, which the readers take one by one.
Torch-free: `verify` runs the same code with nowhere to put the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from ckpt_core.layout import FileEntry, RankManifest
from ckpt_core.restore.slots import Copies
from ckpt_core.units import ALIGN_BYTES

UNIT_BYTES = 16 * 1024 * 1024
"""A unit is at least this long, unless the file ends: small chunks are read many at a time."""

READ_BYTES = 1024 * 1024
"""One read from storage, and the size of each reader's buffer. A cold restore reached 1.3 GB/s with 4 MiB and
4 readers, 1.8 with 1 MiB and 8 readers; 16 MiB was slower still."""

HOT_BYTES = 256 * 1024
"""One read from the page cache: the bytes are hashed while they are in the L2 cache. Measured, 2 cores,
GB/s with hashing: 128 KiB 7.9, 256 KiB 8.8, 512 KiB 8.6, 2 MiB 8.2."""

MAPPED_BYTES = 2 * 1024 * 1024
"""One block of a mapped file. Larger than a cached read, since no system call is saved by staying in L2 and
each block costs the readers a turn at the GIL. Measured likewise: 512 KiB 7.4, 1 MiB 8.0, 2 and 4 MiB 8.4."""

QUEUED_BYTES = 2 * 1024 * 1024
"""One read into a buffer for a device. Larger than others: with eight readers and a fast link, what each read
and hash takes of the interpreter's lock is the limit."""


class Sink(Protocol):
    """Where the bytes of one file go. Called by several readers at once, for disjoint ranges."""

    @property
    def block_bytes(self) -> int:
        """Best length of a read from the page cache, at most READ_BYTES."""

    @property
    def queues(self) -> bool:
        """Whether `deliver` may leave copies queued; then it is given whole buffers, and never a mapping."""

    def window(self, start: int, stop: int, spare: memoryview) -> list[memoryview] | None:
        """Memory that stands for file bytes start..stop, in order; None when there is none.

        Bytes that nobody wants go to consecutive parts of `spare`, which is long enough.
        """

    def deliver(self, start: int, data: memoryview) -> Copies | None:
        """Take file bytes from `start` on; what must end before `data` is used again, if anything."""


class Discard:
    """The sink of `verify`: the bytes are only hashed."""

    block_bytes = HOT_BYTES
    queues = False

    def window(self, start: int, stop: int, spare: memoryview) -> list[memoryview] | None:
        """The whole range goes to `spare`."""
        return [spare[: stop - start]]

    def deliver(self, start: int, data: memoryview) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Read a file into a sink, checking each chunk that has a checksum.

    Attributes:
        wanted: numbers of the chunks to read; None for all of them.
    """

    path: Path
    entry: FileEntry
    sink: Sink
    wanted: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A piece of a file whose bytes are not the ones that were written.

    Attributes:
        path: the file.
        file: its name in the manifest.
        index: number of the chunk in the file; `offset` and `nbytes` say where it lies.
        expected: xxh3 in the manifest (16 hex digits).
        got: xxh3 of the bytes that are there, or why they could not be read.
    """

    path: Path
    file: str
    index: int
    offset: int
    nbytes: int
    expected: str
    got: str

    @property
    def where(self) -> str:
        """In words: the file, the chunk, its bytes."""
        end = self.offset + self.nbytes
        return f"{self.path}: chunk {self.index} (bytes {self.offset}..{end})"

    def leaves_of(self, rank: RankManifest) -> list[str]:
        """Names of the leaves with bytes in it, of the rank that wrote the file."""
        stored = [(leaf.spec.name, leaf.file, leaf.offset, leaf.nbytes) for leaf in rank.leaves]
        stored += [
            (part.spec.name, part.file, part.offset, part.slice.nbytes) for part in rank.slices
        ]
        return [
            name
            for name, file, offset, nbytes in stored
            if rank.files[file].name == self.file
            and max(offset, self.offset) < min(offset + nbytes, self.offset + self.nbytes)
        ]

    def __str__(self) -> str:
        return f"{self.where}: expected xxh3 {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of whole chunks of one job: file bytes offset .. offset+nbytes, from chunk `first` on."""

    job: ReadJob
    first: int
    offset: int
    nbytes: int


def cut(job: ReadJob) -> Iterator[Unit]:
    """The units of a job, in file order; what is not wanted lies between them.

    Each begins at a multiple of 4 KiB, whatever the chunks are: direct reads need it, and no element
    of a leaf straddles two reads then.
    """
    reading = _readable(job)
    first, offset, nbytes = 0, 0, 0
    for index, chunk in enumerate(job.entry.chunks):
        if reading is not None and index not in reading:
            if nbytes:
                yield Unit(job, first, offset, nbytes)
            first, offset, nbytes = index + 1, offset + nbytes + chunk.nbytes, 0
            continue
        nbytes += chunk.nbytes
        if nbytes >= UNIT_BYTES and (offset + nbytes) % ALIGN_BYTES == 0:
            yield Unit(job, first, offset, nbytes)
            first, offset, nbytes = index + 1, offset + nbytes, 0
    if nbytes:
        yield Unit(job, first, offset, nbytes)


def _readable(job: ReadJob) -> set[int] | None:
    """The wanted chunks, and those before them back to the next one that begins at a whole page."""
    if job.wanted is None:
        return None
    reading: set[int] = set()
    position, since = 0, 0
    for index, chunk in enumerate(job.entry.chunks):
        if position % ALIGN_BYTES == 0:
            since = index
        if index in job.wanted:
            reading.update(range(since, index + 1))
            since = index + 1
        position += chunk.nbytes
    return reading


class ChunkCheck:
    """Checksums of the consecutive chunks of one unit, fed with its bytes in order."""

    def __init__(self, unit: Unit, report: Callable[[BadChunk], None]) -> None:
        self._job = unit.job
        self._report = report
        self._index = unit.first
        self._offset = unit.offset
        self._begin()

    def feed(self, views: Sequence[memoryview]) -> None:
        """The next bytes of the unit."""
        for view in views:
            while len(view) >= self._left:
                self._update(view[: self._left])
                view = view[self._left :]
                self._end()
                if not view:
                    break
            else:
                self._update(view)
                self._left -= len(view)

    def broken(self, reason: str) -> BadChunk:
        """The chunk that was being read when reading failed."""
        return self._bad(reason)

    def _begin(self) -> None:
        chunks = self._job.entry.chunks
        chunk = chunks[self._index] if self._index < len(chunks) else None
        self._left = chunk.nbytes if chunk is not None else 0
        self._hash = xxhash.xxh3_64()
        # No checksum was asked for when the step was saved: nothing to compare with.
        checked = chunk is not None and chunk.xxh3 is not None
        self._update = self._hash.update if checked else _ignore

    def _end(self) -> None:
        chunk = self._job.entry.chunks[self._index]
        if chunk.xxh3 is not None and self._hash.hexdigest() != chunk.xxh3:
            self._report(self._bad(self._hash.hexdigest()))
        self._index += 1
        self._offset += chunk.nbytes
        self._begin()

    def _bad(self, got: str) -> BadChunk:
        job, chunk = self._job, self._job.entry.chunks[self._index]
        expected = chunk.xxh3 or "(no checksum)"
        return BadChunk(
            job.path, job.entry.name, self._index, self._offset, chunk.nbytes, expected, got
        )


def _ignore(data: memoryview) -> None:
    """Stands in for `update` where there is no checksum."""
