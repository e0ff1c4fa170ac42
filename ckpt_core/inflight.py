"""One checkpoint between its start and its end, and the set of those that are under way.

    STAGING --all leaves copied--> PERSISTING --all pieces written--> COMMITTING --published--> COMMITTED
       \\__________________________ any error, or the deadline __________________________/--> FAILED

Whoever finds an error (stager, writer, finisher, watchdog) calls `fail`; the first one counts. The finisher
thread then publishes or cleans up, and the watchdog thread fails what outlives its deadline, so that no
future stays open and no one waits for ever on a disk that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ckpt_core.errors import CkptError, PersistError, StagingError
from ckpt_core.layout import Extent
from ckpt_core.persist import ShardFile, WriteJob, WriterPool
from ckpt_core.snapshot import Piece, Snapshot
from ckpt_core.state import Skeleton
from ckpt_core.store import Attempt
from ckpt_core.types import LeafSpec

_log = logging.getLogger("ckpt_core")


class Phase(Enum):
    """Where an in-flight checkpoint is."""

    STAGING = "staging"
    PERSISTING = "persisting"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, beside the bytes of its shard files.

    Attributes:
        leaves: (spec, index of the shard file, extent) of each leaf.
        skeleton: everything that is not a tensor.
    """

    leaves: tuple[tuple[LeafSpec, int, Extent], ...]
    skeleton: Skeleton

    @property
    def state_bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(extent.nbytes for _, _, extent in self.leaves)


class InFlight:
    """A started checkpoint that has not ended yet. Thread-safe.

    Args:
        step: the step it is of.
        root: where it goes, for errors that come before it has a directory.
        deadline: on the monotonic clock; the watchdog fails the checkpoint then.
        make_attempt: creates its directory; called once, from a background thread.
        on_ready: called once when nothing is being staged or written for it any more.
        on_failed: told once when it is given up, before its futures are; not when `reported` is set.
    """

    def __init__(
        self,
        step: int,
        *,
        root: Path,
        deadline: float,
        make_attempt: Callable[[InFlight], Attempt],
        on_ready: Callable[[InFlight], None],
        on_failed: Callable[[InFlight], None],
    ) -> None:
        self.step = step
        self.root = root
        self.deadline = deadline
        self.began = time.monotonic()
        self.snapshot = Snapshot(step)
        self.committed: Future[Path] = Future()
        self.shards: list[ShardFile] = []
        self.attempt: Attempt | None = None
        self.error: BaseException | None = None
        self.contents: Contents | None = None
        self.reported = False
        self._make_attempt = make_attempt
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._lock = threading.Lock()
        # Apart from _lock: making the directory may hang on storage, and failing must not.
        self._making = threading.Lock()
        self._when_failed: Callable[[], None] | None = None
        self._phase = Phase.STAGING
        self._pending = 0
        self._staging = True
        self._leases: list[Callable[[], None]] = []
        for future in (self.committed, self.snapshot.staged):
            # From here on cancel() does nothing: a started checkpoint ends, well or badly.
            future.set_running_or_notify_cancel()

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._phase

    @property
    def file_bytes(self) -> int:
        """Length of all its shard files."""
        return sum(shard.request.nbytes for shard in self.shards)

    def failed(self) -> bool:
        """Whether it has been given up; asked by everyone who works for it."""
        return self._phase is Phase.FAILED

    def directory(self) -> Attempt:
        """Its directory, made at the first call. Called from background threads.

        Raises:
            PersistError: it could not be made.
        """
        with self._making:
            if self.attempt is None:
                self.attempt = self._make_attempt(self)
            return self.attempt

    def open_ended(self, when_failed: Callable[[], None]) -> None:
        """It ends only when the caller says so (layer-wise form).

        `when_failed` is called from whatever thread gives it up; it must not block.
        """
        with self._lock:
            self._when_failed = when_failed

    def end_announced(self) -> None:
        """The caller has said so: it goes on by itself from here."""
        with self._lock:
            self._when_failed = None

    @property
    def is_open_ended(self) -> bool:
        """Whether it waits for its caller."""
        return self._when_failed is not None

    def fail(self, error: BaseException) -> None:
        """Give it up. The first error counts; later ones, and one after the commit, change nothing.

        The error is told the step and the path, where whoever raised it did not know them.
        """
        self._place(error)
        with self._lock:
            if self._phase in (Phase.COMMITTED, Phase.FAILED):
                return
            self._phase = Phase.FAILED
            self.error = error
            callback = self._when_failed
            told, self.reported = self.reported, True
        if not told:
            # Order matters: whoever has waited for a future finds the failure at the next save.
            self._on_failed(self)
        self.snapshot.fail(error)
        self.committed.set_exception(error)
        if callback is not None:
            callback()

    def _place(self, error: BaseException) -> None:
        if isinstance(error, CkptError):
            error.step = self.step if error.step is None else error.step
            attempt = self.attempt
            place = self.root if attempt is None else attempt.path
            error.path = place if error.path is None else error.path

    def begin_commit(self) -> bool:
        """Enter COMMITTING; False when it has been given up. Called by the finisher."""
        with self._lock:
            if self._phase is Phase.FAILED:
                return False
            self._phase = Phase.COMMITTING
            return True

    def succeed(self, path: Path) -> bool:
        """It is published at `path`; False when the watchdog had already given it up."""
        with self._lock:
            if self._phase is Phase.FAILED:
                return False
            self._phase = Phase.COMMITTED
        self.committed.set_result(path)
        return True

    # -- progress --------------------------------------------------------------------------------

    def until_staged(self, end_lease: Callable[[], None]) -> None:
        """Call `end_lease` when nothing more will be staged for it."""
        with self._lock:
            self._leases.append(end_lease)

    def staging_ended(self) -> None:
        """Nothing more will be staged for it. Called by the stager or by `save`. Idempotent."""
        with self._lock:
            if not self._staging:
                return
            self._staging = False
            if self._phase is Phase.STAGING:
                self._phase = Phase.PERSISTING
            ready = self._pending == 0
            leases, self._leases = self._leases, []
        for end_lease in leases:
            end_lease()
        if ready:
            self._on_ready(self)

    def piece_submitted(self) -> None:
        """A piece goes to the writers."""
        with self._lock:
            self._pending += 1

    def piece_done(self, error: BaseException | None) -> None:
        """A writer is done with a piece."""
        if error is not None:
            self.fail(error)
        with self._lock:
            self._pending -= 1
            ready = self._pending == 0 and not self._staging
        if ready:
            self._on_ready(self)


@dataclass(frozen=True, slots=True)
class ShardSink:
    """Takes the pieces of one shard image to the writers (the ChunkSink of snapshot/)."""

    inflight: InFlight
    shard: ShardFile
    writers: WriterPool

    def submit(self, piece: Piece) -> None:
        """Queue a piece for writing."""
        self.inflight.piece_submitted()
        self.writers.submit(
            WriteJob(self.shard, piece, self.inflight.failed, self.inflight.piece_done)
        )

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Memory of the file itself."""
        return self.shard.window(offset, nbytes)


class Flights:
    """The in-flight checkpoints: at most `limit`; owns the finisher and the watchdog thread.

    Args:
        limit: how many may be in flight.
        finish: publishes one that is complete, or cleans up one that failed; runs on the finisher thread.
    """

    def __init__(self, limit: int, *, finish: Callable[[InFlight], None]) -> None:
        self._limit = limit
        self._finish = finish
        self._changed = threading.Condition()
        self._active: list[InFlight] = []
        self._ready: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def admit(self, make: Callable[[], InFlight], *, deadline: float) -> InFlight:
        """Add the checkpoint that `make` gives; blocks while `limit` are in flight.

        Raises:
            StagingError: none of them ended before the deadline.
        """
        with self._changed:
            while len(self._active) >= self._limit:
                left = deadline - time.monotonic()
                if left <= 0:
                    steps = ", ".join(str(flight.step) for flight in self._active)
                    raise StagingError(
                        f"in_flight={self._limit} checkpoints (steps {steps}) are still not "
                        f"committed: storage is stuck or far slower than the saves. Earlier steps "
                        f"are untouched; save less often, or raise in_flight or timeout"
                    )
                self._changed.wait(left)
            inflight = make()
            self._active.append(inflight)
            self._start_threads()
            self._changed.notify_all()
            return inflight

    def ready(self, inflight: InFlight) -> None:
        """Nothing is staged or written for it any more: let the finisher have it."""
        self._ready.put(inflight)

    def active(self) -> tuple[InFlight, ...]:
        """Those in flight, oldest first."""
        with self._changed:
            return tuple(self._active)

    def wait_empty(self, *, deadline: float) -> bool:
        """Wait until none is in flight; False when the deadline passed first."""
        with self._changed:
            while self._active:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def close(self, *, timeout_s: float) -> None:
        """End both threads; a thread that hangs is left behind after `timeout_s`. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._ready.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    # -- threads ---------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if self._threads:
            return
        for name, target in (("finisher", self._run_finisher), ("watchdog", self._run_watchdog)):
            thread = threading.Thread(target=target, name=f"ckpt-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_finisher(self) -> None:
        while (inflight := self._ready.get()) is not None:
            try:
                self._finish(inflight)
            except BaseException as exc:
                inflight.fail(exc)
            self._retired(inflight)
            # Do not keep the last checkpoint alive while waiting for the next.
            del inflight

    def _run_watchdog(self) -> None:
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                expired = [flight for flight in self._active if flight.deadline <= now]
                for inflight in expired:
                    inflight.fail(_overdue(inflight))
                    self._drop(inflight)
                nearest = min((f.deadline for f in self._active), default=None)
                self._changed.wait(None if nearest is None else max(nearest - now, 0.0))

    def _retired(self, inflight: InFlight) -> None:
        with self._changed:
            self._drop(inflight)

    def _drop(self, inflight: InFlight) -> None:
        if inflight not in self._active:
            return
        self._active.remove(inflight)
        self._changed.notify_all()


def _overdue(inflight: InFlight) -> CkptError:
    seconds = time.monotonic() - inflight.began
    return PersistError(
        f"step {inflight.step} was given up after {seconds:.1f} s while {inflight.phase.value}: storage "
        f"is stuck or too slow for `timeout`. Earlier steps are untouched; training may go on",
        step=inflight.step,
    )


def settle_all(flights: Iterable[InFlight]) -> None:
    """Give up every one of them. Called when the Checkpointer closes before they could end."""
    for inflight in flights:
        text = "the Checkpointer was closed while storage was stuck; earlier steps are untouched"
        inflight.fail(PersistError(f"step {inflight.step} was not saved: {text}"))


@contextlib.contextmanager
def failing(inflight: InFlight) -> Iterator[None]:
    """Work of `save` itself: an error ends the checkpoint and is raised here, so not reported again."""
    try:
        yield
    except BaseException as exc:
        inflight.reported = True
        inflight.fail(exc)
        inflight.staging_ended()
        raise
