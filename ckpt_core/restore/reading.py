"""Parallel reading: `readers` threads take units of work, verify each chunk, and fill the sinks.

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

Memory: `read_bytes` for each reader, whatever the chunk size or the state, or its two buffers for devices.

States of a run:  running --units used up--> ended
                  running --first finding (unless keep_going), error, deadline--> halted --> ended
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.restore.failures import NoMeans, ReadHung
from ckpt_core.restore.shard_reader import ShardReader, Truncated
from ckpt_core.restore.slots import SLOTS, Slots
from ckpt_core.restore.units import (
    HOT_BYTES,
    MAPPED_BYTES,
    QUEUED_BYTES,
    READ_BYTES,
    BadChunk,
    ChunkCheck,
    ReadJob,
    Unit,
    cut,
)
from ckpt_core.system.files import Files
from ckpt_core.system.pages import page_memory
from ckpt_core.system.threads import Monitor, at_exit

if TYPE_CHECKING:
    from ckpt_core.system.devices import Devices

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_NOTHING = memoryview(b"")
_TICK_S = 0.1
_DRAIN_S = 10.0


def page_buffer(nbytes: int) -> memoryview:
    """Page-aligned memory, which O_DIRECT needs; pages are touched when they are first used."""
    return memoryview(page_memory(nbytes))


@dataclass(slots=True)
class Outcome:
    """What a run found: `bad` in no particular order, `failed` the reads that the system refused."""

    bad: list[BadChunk] = field(default_factory=list)
    failed: list[tuple[Path, OSError]] = field(default_factory=list)
    crashed: BaseException | None = None
    done_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ParallelReader:
    """How to read: shared by every run of one restore or verify.

    Attributes:
        readers: threads.
        timeout_s: longest time that one read may take.
        exclusive: nobody else changes the files meanwhile (the owner of the root restores): what is in the
            page cache may be read through a mapping.
        new_buffer: gives all readers together their page-aligned buffer, once for each run; pinned memory
            when tensors on devices are filled.
        slot_bytes: of each buffer that devices are filled from, whole pages; None: no tensor is on one.
        devices: the door to those; None: the real one, which whoever only verifies never opens.
        progress: called now and then by the thread that waits.
        buffered: leave in the page cache what is read from storage.
    """

    files: Files
    readers: int
    timeout_s: float
    exclusive: bool = False
    new_buffer: Callable[[int], memoryview] = page_buffer
    slot_bytes: int | None = None
    devices: Devices | None = None
    progress: Progress | None = None
    buffered: bool = False

    @property
    def read_bytes(self) -> int:
        """Of one read from storage, and of each reader's buffer."""
        return max(READ_BYTES, self.files.best_read_bytes)

    def run(self, jobs: Sequence[ReadJob], *, keep_going: bool = False) -> Outcome:
        """Read every job's file whole. Returns when no reader touches a sink any more.

        Args:
            keep_going: go on after a bad chunk or a failed read, to find them all.

        Raises:
            NoMeans: there is no memory or no thread to read with.
            ReadHung: one read took longer than `timeout_s`. Its thread is left behind, since
                nothing can interrupt it, and may still write into its destination.
        """
        run = _Run(self, jobs, keep_going=keep_going)
        try:
            run.start()
            run.wait()
        finally:
            run.halt()
        crashed = run.outcome.crashed
        if isinstance(crashed, MemoryError):
            raise NoMeans(jobs[0].path, crashed) from crashed
        if crashed is not None:
            raise crashed
        return run.outcome


class _Run:
    """One call of `ParallelReader.run`: owns the threads and the open files."""

    def __init__(self, how: ParallelReader, jobs: Sequence[ReadJob], *, keep_going: bool) -> None:
        self.how = how
        self.outcome = Outcome()
        self.halted = False
        self.shards = {
            job.path: ShardReader(
                job.path, nbytes=job.entry.nbytes, files=how.files, buffered=how.buffered
            )
            for job in jobs
        }
        units = [unit for job in jobs for unit in cut(job)]
        self._total_bytes = sum(unit.nbytes for unit in units)
        self._keep_going = keep_going
        self._units = iter(units)
        self._changed = Monitor()
        self._workers = [_Worker(self) for _ in range(min(how.readers, len(units)))]
        self._running = 0
        # Readers copy into tensors; a wait for them that is interrupted goes on at the end of the process.
        self._at_exit = at_exit(self.halt, self.halt, priority=0)

    def start(self) -> None:
        slot_bytes = self.how.slot_bytes
        count, each = (
            (1, self.how.read_bytes) if slot_bytes is None else (SLOTS, SLOTS * slot_bytes)
        )
        # One for all: a fast disk wants huge pages, which are larger than what each reader needs.
        try:
            buffer = self.how.new_buffer(max(len(self._workers), 1) * each)
        except (OSError, MemoryError) as exc:
            raise NoMeans(next(iter(self.shards), Path()), exc) from exc
        for index, worker in enumerate(self._workers):
            worker.slots = Slots(buffer[index * each : (index + 1) * each], count=count)
            # Daemon: a read that never returns must not keep the process from ending.
            thread = threading.Thread(
                target=self._work, args=(worker,), name="ckpt-reader", daemon=True
            )
            with self._changed.lock:
                self._running += 1
            try:
                thread.start()
            except RuntimeError as exc:
                with self._changed.lock:
                    self._running -= 1
                if index == 0:
                    raise NoMeans(next(iter(self.shards)), exc) from exc
                break  # Fewer readers read as well.

    def wait(self) -> None:
        """Block until every reader has ended; raises ReadHung when one is stuck."""
        while not self._ended(_TICK_S):
            self._check_deadline()
            self._show()
        self._show()

    def halt(self) -> None:
        """Make the readers stop, and wait for those that can. Also after KeyboardInterrupt."""
        self.halted = True
        if not self._stuck():
            self._ended(min(self.how.timeout_s, _DRAIN_S))
        self._at_exit.cancel()

    def units(self) -> Iterator[Unit]:
        """The units that this thread is to read."""
        while not self.halted:
            with self._changed.lock:
                unit = next(self._units, None)
            if unit is None:
                return
            yield unit

    def found_bad(self, bad: BadChunk) -> None:
        with self._changed.lock:
            self.outcome.bad.append(bad)
        self.halted = self.halted or not self._keep_going

    def found_error(self, path: Path, error: OSError) -> None:
        with self._changed.lock:
            self.outcome.failed.append((path, error))
        self.halted = self.halted or not self._keep_going

    # -- inside ----------------------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        try:
            worker.run()
        except BaseException as exc:  # raised again by `run`, in the thread that called it
            self.outcome.crashed = exc
            self.halted = True
        finally:
            worker.since = None
            with self._changed.lock:
                self._running -= 1
                last = self._running == 0
                if last:
                    self._close()
                self._changed.notify_all()
        if last:  # after whoever waits has been told: nobody needs to wait for it
            for shard in self.shards.values():
                shard.unmap()

    def _close(self) -> None:
        for shard in self.shards.values():
            shard.close()

    def _ended(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return self._changed.wait_for(lambda: self._running == 0, deadline=deadline)

    def _show(self) -> None:
        self.outcome.done_bytes = sum(worker.done_bytes for worker in self._workers)
        if self.how.progress is not None:
            self.how.progress(self.outcome.done_bytes, self._total_bytes)

    def _stuck(self) -> _Worker | None:
        now = time.monotonic()
        for worker in self._workers:
            since = worker.since
            if since is not None and now - since > self.how.timeout_s:
                return worker
        return None

    def _check_deadline(self) -> None:
        worker = self._stuck()
        if worker is None or worker.unit is None:
            return
        path = worker.unit.job.path
        what, where = "a read", "storage"
        if worker.slots.waiting:
            what, where = "a copy to a device of what was read", "device"
        raise ReadHung(
            f"{path}: {what} at byte {worker.position} has not returned for {self.how.timeout_s:g} s: "
            f"the {where} is probably stuck. Nothing on storage was changed; the destination tensors may "
            "be partly overwritten, also later, should it come back",
            path=path,
        )


class _Worker:
    """What one thread does, and where it is, for the thread that watches it."""

    def __init__(self, run: _Run) -> None:
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
        most = min(self._run.how.read_bytes, len(buffer))
        while position < stop and not self._run.halted:
            self._at(position)
            step = unit.job.sink.block_bytes if cached else most
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
        return self._run.how.exclusive and unit.job.sink.block_bytes == HOT_BYTES

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
