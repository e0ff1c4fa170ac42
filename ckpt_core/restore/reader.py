"""One reader: a thread that takes units of work, verifies each chunk, and fills the sinks.

Three ways, chosen for each unit by what the page cache holds (mincore; its first page with RWF_NOWAIT):

    all in the cache    by the owner of the root: hashed and copied from a mapping, 1 MiB at a time; on 2
                        cores 9.8 GB/s with hashing, where torch.load(mmap=True) and copy_ reach 9.1

    in the page cache   scatter `preadv` straight into the destinations, 256 KiB at a time, hashed while in
                        the L2 cache; on 2 cores 8.8 GB/s with hashing, through a bounce buffer 7.3
    not there           O_DIRECT reads of 1 MiB into the reader's page-aligned buffer, hashed, copied on;
                        2.6 GB/s where the bare reads reach 3.7 and buffered ones 1.6, and the page
                        cache keeps what it holds

    to a device         either, into one of the reader's two page-locked buffers; the copies from it are
                        queued, and waited for before it is used again
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ckpt_core.restore.shard_reader import ShardReader, Truncated
from ckpt_core.restore.slots import Slots
from ckpt_core.restore.units import (
    HOT_BYTES,
    MAPPED_BYTES,
    QUEUED_BYTES,
    BadChunk,
    ChunkCheck,
    Unit,
)

_NOTHING = memoryview(b"")


class Shared(Protocol):
    """What the readers of one run share.

    Attributes:
        read_bytes: of one read from storage.
        exclusive: nobody else changes the files meanwhile.
        shards: by path.
        halted: the readers are to stop.
    """

    read_bytes: int
    exclusive: bool
    shards: dict[Path, ShardReader]
    halted: bool

    def units(self) -> Iterator[Unit]:
        """Those that this thread is to read."""

    def found_bad(self, bad: BadChunk) -> None:
        """Note a chunk that is not as it was written."""

    def found_error(self, path: Path, error: OSError) -> None:
        """Note a read that the system has refused."""


class Reader:
    """What one thread does, and where it is, for the thread that watches it."""

    def __init__(self, run: Shared) -> None:
        self._run = run
        self.unit: Unit | None = None
        self.position = 0
        self.since: float | None = None
        self.done_bytes = 0
        self.slots = Slots(_NOTHING)

    def run(self) -> None:
        try:
            for unit in self._run.units():
                self._read_checked(unit)
        finally:
            # Invariant: once a reader has ended, nothing is copied from its buffers or to its tensors.
            self._at(self.position)
            self.slots.drain()
            # Locked memory is not to wait for the garbage collector.
            self.slots = Slots(_NOTHING)

    def _read_checked(self, unit: Unit) -> None:
        self.unit = unit
        self._at(unit.offset)
        check = ChunkCheck(unit, self._run.found_bad)
        try:
            self._read(unit, check)
        except Truncated as exc:
            self._run.found_bad(check.broken(str(exc)))
        except OSError as exc:
            self._run.found_error(unit.job.path, exc)
        self.since = None

    def _at(self, position: int) -> None:
        self.position = position
        self.since = time.monotonic()

    def _read(self, unit: Unit, check: ChunkCheck) -> None:
        shard = self._run.shards[unit.job.path]
        shard.open()
        position, stop = unit.offset, unit.offset + unit.nbytes
        if self._may_map(unit) and shard.is_resident(position, unit.nbytes):
            self._read_mapped(unit, check)
            return
        buffer = self.slots.free()
        cached = shard.is_cached(position, buffer)
        if unit.job.sink.queues:
            self._read_queued(unit, check, cached=cached)
            return
        most = min(self._run.read_bytes, len(buffer))
        while position < stop and not self._run.halted:
            self._at(position)
            # Where another file fills devices, the buffer may be shorter than the best block.
            step = min(unit.job.sink.block_bytes, most) if cached else most
            end = min(position + step, stop)
            if cached:
                cached = self._read_cached(unit, check, position, end)
                if not cached:
                    continue
            else:
                self._read_cold(unit, check, position, end)
            self.done_bytes += end - position
            position = end

    def _may_map(self, unit: Unit) -> bool:
        # A mapping answers with SIGBUS when the file shrinks: only for files that nobody else changes.
        return self._run.exclusive and unit.job.sink.block_bytes == HOT_BYTES

    def _read_mapped(self, unit: Unit, check: ChunkCheck) -> None:
        shard, stop = self._run.shards[unit.job.path], unit.offset + unit.nbytes
        for start in range(unit.offset, stop, MAPPED_BYTES):
            if self._run.halted:
                return
            self._at(start)
            piece = shard.mapped(start, min(start + MAPPED_BYTES, stop))
            check.feed([piece])
            unit.job.sink.deliver(start, piece)
            self.done_bytes += len(piece)

    def _read_queued(self, unit: Unit, check: ChunkCheck, *, cached: bool) -> None:
        """Buffer by buffer: the copies from one run while the other is read."""
        stop = unit.offset + unit.nbytes
        for start in range(unit.offset, stop, self.slots.nbytes):
            self._at(start)
            data = self.slots.free()[: stop - start]
            for at in range(0, len(data), QUEUED_BYTES):
                if self._run.halted:
                    return
                self._at(start + at)
                piece = data[at : at + QUEUED_BYTES]
                cached = self._fetch(unit, piece, start + at, cached=cached)
                check.feed([piece])
            copies = unit.job.sink.deliver(start, data)
            if copies is not None:
                self.slots.queued(copies)
            self.done_bytes += len(data)

    def _fetch(self, unit: Unit, data: memoryview, position: int, *, cached: bool) -> bool:
        """Read into a buffer; whether the page cache had it."""
        shard = self._run.shards[unit.job.path]
        if cached and shard.read_cached([data], position):
            return True
        if shard.can_read_direct(position, len(data)):
            shard.read_direct(data, position)
        else:
            shard.read([data], position)
        return False

    def _read_cached(self, unit: Unit, check: ChunkCheck, start: int, stop: int) -> bool:
        buffer = self.slots.free()
        window = unit.job.sink.window(start, stop, buffer)
        views = [buffer[: stop - start]] if window is None else window
        if not self._run.shards[unit.job.path].read_cached(views, start):
            return False
        check.feed(views)
        if window is None:
            unit.job.sink.deliver(start, views[0])
        return True

    def _read_cold(self, unit: Unit, check: ChunkCheck, start: int, stop: int) -> None:
        shard, sink, buffer = self._run.shards[unit.job.path], unit.job.sink, self.slots.free()
        data = buffer[: stop - start]
        if shard.can_read_direct(start, stop - start):
            shard.read_direct(data, start)
        elif (window := sink.window(start, stop, buffer)) is not None:
            shard.read(window, start)
            check.feed(window)
            return
        else:
            shard.read([data], start)
        # Whole: each step of it costs a turn at the GIL, and the next read is asked for later.
        check.feed([data])
        sink.deliver(start, data)
