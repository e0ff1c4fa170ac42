"""The writer threads: p of them take filled pieces from one queue and write each to its shard file.

Pieces of an older checkpoint come before those of a newer one, since the stager is first-in first-out; so
the older one commits first and its chunks are free first. PCcheck (ASPLOS '25) 3.1 and 3.3 give each
checkpoint p threads; here the p threads are shared, which bounds the load on the device by p.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_core.persist.requests import PieceLike
from ckpt_core.persist.shard_file import ShardFile
from ckpt_core.system.threads import Worker, join_all, own_lock, start_all

_log = logging.getLogger("ckpt_core")


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A piece to write.

    Attributes:
        shard: the file it belongs to.
        piece: the bytes; released when the job is over, whatever came of it.
        cancelled: true means: do not write any more, only release.
        done: called with None or the error, after the release.
    """

    shard: ShardFile
    piece: PieceLike
    cancelled: Callable[[], bool]
    done: Callable[[BaseException | None], None]

    def __call__(self) -> None:
        """Write it, or only release it."""
        error: BaseException | None = None
        try:
            self.piece.ready.enter()
            if not self.cancelled():
                self.piece.ready.wait()
                self.shard.write(self.piece)
        except BaseException as exc:  # every failure belongs to the checkpoint, none to the thread
            error = exc
        try:
            # Waits as well: copies may run into a piece that is not written.
            self.piece.release()
        finally:
            self.done(error)


class WriterPool:
    """Owns the writer threads. `close` is idempotent."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.workers = [Worker(self._run, name=f"ckpt-writer-{index}") for index in range(count)]

    def start(self) -> None:
        """Start the threads. Called once, when the Checkpointer is made.

        Raises:
            PersistError: the system gives no more threads.
        """
        start_all(self.workers)

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a piece, or what brings pieces; returns at once."""
        self._jobs.put(job)

    def close(self, *, timeout_s: float) -> None:
        """End the threads after the jobs already queued; one that hangs is left behind."""
        for _ in self.workers:
            self._jobs.put(None)
        join_all(self.workers, timeout_s=timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # the thread outlives any job
                _log.exception("a job of a writer failed outside its own error handling")
            # A finished job holds a piece of the staging pool; do not keep it until the next one.
            del job


class HeldBack:
    """Keeps the pieces of one shard file from the writers until its checkpoint is staged.

    Source: CheckFreq (FAST '21) 4.1, two phases; PCcheck 3.1, the form that is not pipelined.
    """

    def __init__(self, writers: WriterPool) -> None:
        self._writers = writers
        self._held: list[WriteJob] | None = []
        self._lock = own_lock()

    def submit(self, job: WriteJob) -> None:
        """Keep a piece; after `let_go` it goes to the writers at once."""
        with self._lock:
            if self._held is not None:
                self._held.append(job)
                return
        self._writers.submit(job)

    def let_go(self) -> None:
        """Give the writers what was kept; of a checkpoint that failed they only release it. Idempotent."""
        with self._lock:
            held, self._held = self._held, None
        for job in held or ():
            self._writers.submit(job)
