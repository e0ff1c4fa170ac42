"""Parallel reading: `readers` threads take units of work, verify each chunk, and fill the sinks (`reader`).

Memory: `read_bytes` for each reader, whatever the chunk size or the state, or its two buffers for devices.

States of a run:  running --units used up--> ended
                  running --first finding (unless keep_going), error, deadline--> halted --> ended
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.restore.failures import CutShort, NoMeans, ReadHung
from ckpt_core.restore.reader import Reader
from ckpt_core.restore.shard_reader import ShardReader
from ckpt_core.restore.slots import SLOTS, Slots
from ckpt_core.restore.units import READ_BYTES, BadChunk, ReadJob, Unit, cut
from ckpt_core.system.files import Files
from ckpt_core.system.pages import page_memory
from ckpt_core.system.threads import Monitor, at_exit
from ckpt_core.units import parse_count

if TYPE_CHECKING:
    from ckpt_core.system.devices import Devices

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

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

    def __post_init__(self) -> None:
        # Without a reader a run would end as if all had been read.
        parse_count(self.readers, field="readers")

    @property
    def read_bytes(self) -> int:
        """Of one read from storage, and of each reader's buffer."""
        return max(READ_BYTES, self.files.best_read_bytes)

    def run(self, jobs: Sequence[ReadJob], *, keep_going: bool = False) -> Outcome:
        """Read every job's file whole. Returns when no reader touches a sink any more.

        Args:
            keep_going: go on after a bad chunk or a failed read, to find them all.

        Raises:
            NoMeans: there is no memory or no thread to read with, or the process ends meanwhile.
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
        if (path := run.cut_short()) is not None:
            raise CutShort(path)
        return run.outcome


class _Run:
    """One call of `ParallelReader.run`: owns the threads and the open files."""

    def __init__(self, how: ParallelReader, jobs: Sequence[ReadJob], *, keep_going: bool) -> None:
        self.how = how
        self.read_bytes, self.exclusive = how.read_bytes, how.exclusive
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
        self._left = Counter(unit.job.path for unit in units)
        self._changed = Monitor()
        self._workers = [Reader(self) for _ in range(min(how.readers, len(units)))]
        self._running = 0
        # Readers copy into tensors; a wait for them that is interrupted goes on at the end of the process.
        self._at_exit = at_exit(self.halt, self.halt, priority=0)

    def start(self) -> None:
        slot_bytes = self.how.slot_bytes
        count, each = (1, self.read_bytes) if slot_bytes is None else (SLOTS, SLOTS * slot_bytes)
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
        if not self._stuck() and self._ended(min(self.how.timeout_s, _DRAIN_S)):
            # Each knows this run: the tensors are not to wait for the garbage collector.
            self._workers = []
        self._at_exit.cancel()

    def cut_short(self) -> Path | None:
        """A file of which something was left, though nothing was found that ends a run; once it has ended."""
        found = self.outcome.bad or self.outcome.failed
        if found and not self._keep_going:
            return None
        return next((path for path, left in self._left.items() if left), None)

    def units(self) -> Iterator[Unit]:
        """The units that this thread is to read, each read when the next is asked for."""
        read: Unit | None = None
        while not self.halted:
            with self._changed.lock:
                unit = next(self._units, None)
                if read is not None:
                    self._left[read.job.path] -= 1
            if unit is None:
                return
            if read is not None and not self._left[read.job.path]:
                # A step may have more files than this process may have open.
                self.shards[read.job.path].close()
                self.shards[read.job.path].unmap()
            yield unit
            read = unit

    def found_bad(self, bad: BadChunk) -> None:
        with self._changed.lock:
            self.outcome.bad.append(bad)
        self.halted = self.halted or not self._keep_going

    def found_error(self, path: Path, error: OSError) -> None:
        with self._changed.lock:
            self.outcome.failed.append((path, error))
        self.halted = self.halted or not self._keep_going

    # -- inside ----------------------------------------------------------------------------------

    def _work(self, worker: Reader) -> None:
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

    def _stuck(self) -> Reader | None:
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
