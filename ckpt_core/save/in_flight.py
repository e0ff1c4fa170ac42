"""One checkpoint between its start and its end.

    STAGING --all leaves copied--> PERSISTING --all pieces written--> COMMITTING --published--> COMMITTED
       \\__________________________ any error, or the deadline __________________________/--> FAILED

Whoever finds an error (stager, writer, finisher, watchdog) calls `fail`; the first one counts. A finisher
thread then publishes or cleans up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from ckpt_core.coordination import Reference
from ckpt_core.errors import CkptError, PersistError
from ckpt_core.persist import ShardFile
from ckpt_core.share import Placed
from ckpt_core.snapshot import ShardImage, Snapshot, StagingPool
from ckpt_core.state import Skeleton
from ckpt_core.store import Attempt
from ckpt_core.types import Destination

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
    """What this rank stores of a checkpoint, beside the bytes of its shard files.

    Attributes:
        placed: each part of a leaf, its shard file and its place there.
        skeleton: everything that is not a tensor; None when it is in the files.
        plans: hashes of what must be equal on all ranks; none in a job of one.
        reference: what this rank has seen of what all ranks must have equal; None in a job of one.
        named_bytes: length of the named files, which hold no leaves.
    """

    placed: tuple[Placed, ...]
    skeleton: Skeleton | None
    plans: tuple[str, ...] = ()
    reference: Reference | None = None
    named_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all parts, or of the named files."""
        return sum(place.extent.nbytes for place in self.placed) + self.named_bytes


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an in-flight checkpoint asks of its owner.

    Attributes:
        make_attempt: creates its directory; called once, from a background thread.
        give_up: see `InFlight.give_up`; called on the training thread.
        clean_up: has `clean_up` called on the stager thread, soon.
        refusal: asked of an error what another rank had failed with before; may wait for it.
        on_staged: told once when all its leaves have been copied.
        on_ready: called once when nothing is being staged or written for it any more.
        on_failed: told once when it is given up, before its futures are; not when `reported` is set.
        on_raised: told of an error that `on_failed` has heard of and the caller has been given meanwhile.
    """

    make_attempt: Callable[[InFlight], Attempt]
    give_up: Callable[[InFlight, BaseException], None]
    clean_up: Callable[[InFlight], None]
    refusal: Callable[[InFlight, BaseException], CkptError | None]
    on_staged: Callable[[InFlight], None]
    on_ready: Callable[[InFlight], None]
    on_failed: Callable[[InFlight], None]
    on_raised: Callable[[BaseException], None]


class InFlight:
    """A started checkpoint that has not ended yet. Thread-safe. Making one starts nothing.

    Args:
        step: the step it is of.
        root: where it goes, for errors that come before it has a directory.
        hooks: see there.

    Attributes:
        attempt_id: names this try; the same on all ranks; "" before it is drawn.
        destination: where named files go; None: it becomes a step.
        images: everything that may hold chunks for it.
    """

    def __init__(self, step: int, *, root: Path, hooks: Hooks) -> None:
        self.step = step
        self.destination: Destination | None = None
        self.attempt_id = ""
        self.root = root
        self.began = self.deadline = time.monotonic()
        self.snapshot = Snapshot(step, on_staged=partial(hooks.on_staged, self))
        self.committed: Future[Path] = Future()
        self.shards: list[ShardFile] = []
        self.images: list[ShardImage] = []
        self.attempt: Attempt | None = None
        self.error: BaseException | None = None
        self.contents: Contents | None = None
        self.reported = False
        self.voted = False
        self._hooks = hooks
        self._lock = threading.Lock()
        # Apart from _lock: making the directory may hang on storage, and failing must not.
        self._making = threading.Lock()
        self._open_ended = False
        self._ended = threading.Lock()
        self._ended.acquire()
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
        """Length of all its files that are known so far."""
        return sum(shard.request.file_bytes for shard in self.shards)

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
                self.attempt = self._hooks.make_attempt(self)
            return self.attempt

    def start_clock(self, timeout_s: float) -> None:
        """It begins now; the watchdog fails it when `timeout_s` are over."""
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s

    def open_ended(self) -> None:
        """It ends only when the caller says so, and only the stager touches its images."""
        self._open_ended = True

    def end_announced(self) -> None:
        """The caller has said so: it goes on by itself from here."""
        self._open_ended = False

    @property
    def is_open_ended(self) -> bool:
        """Whether it waits for its caller."""
        return self._open_ended

    def give_up(self, error: BaseException) -> None:
        """End it from the training thread, which does not touch it again. Idempotent.

        The caller is told of `error`, so no later save raises it. Everything that must not be interrupted
        is done by other threads.
        """
        self._hooks.give_up(self, error)

    def clean_up(self) -> None:
        """Give back what it holds of the staging memory. On the stager thread, behind all of its jobs."""
        for image in self.images:
            image.abandon()
        self.staging_ended()

    def fail(self, error: BaseException) -> None:
        """Give it up. The first error counts; later ones, and one after the commit, change nothing.

        Called from background threads, where no interrupt comes half-way. The error is told the step and the
        path, where whoever raised it did not know them. Where it may be the work of another rank, that rank's
        error is waited for, some seconds at most.
        """
        error = _to_report(error)
        if self._phase in (Phase.STAGING, Phase.PERSISTING):
            error = self.explained(error)
        self._place(error)
        with self._lock:
            if self._phase in (Phase.COMMITTED, Phase.FAILED):
                return
            self._phase = Phase.FAILED
            self.error = error
            told, self.reported = self.reported, True
            # Now: whoever seals it from here on finds it failed, and leaves its end to us.
            left_open = self._open_ended
        if not told:
            # Order matters: whoever has waited for a future finds the failure at the next save.
            self._hooks.on_failed(self)
        self.snapshot.fail(error)
        self.committed.set_exception(error)
        self._ended.release()
        if left_open:
            self._hooks.clean_up(self)

    def explained(self, error: BaseException) -> BaseException:
        """The error, or what another rank had failed with when that is behind it."""
        refusal = self._hooks.refusal(self, error)
        if refusal is None:
            return error
        refusal.__cause__ = error
        return refusal

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
        self._ended.release()
        return True

    def wait_ended(self) -> None:
        """Block until it is committed. Called by the training thread for `blocking`.

        Raises:
            Exception: what failed it, which no later save raises again.
        """
        # Ends: at the deadline the watchdog fails it, whatever hangs. Not by the future: interrupted while it
        # is asked, that one may stay locked for the thread that ends it.
        with self._ended:
            pass
        try:
            self.committed.result()
        except Exception as exc:
            self._hooks.on_raised(exc)
            raise

    # -- progress --------------------------------------------------------------------------------

    def until_staged(self, end_lease: Callable[[], None]) -> None:
        """Call `end_lease` when nothing more will be staged for it, which may be now."""
        with self._lock:
            if self._staging:
                self._leases.append(end_lease)
                return
        end_lease()

    def lease(self, pool: StagingPool) -> None:
        """Keep the pool from being replaced while more may be staged for it. Idempotent."""
        # Order matters: an interrupt between the two must leave no lease that nobody ends.
        self.until_staged(partial(pool.end_lease, self))
        pool.lease(self)
        if not self._staging:
            pool.end_lease(self)

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
            self._hooks.on_ready(self)

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
            self._hooks.on_ready(self)


def _to_report(error: BaseException) -> BaseException:
    """Raised in a later call, as it is, the end of a thread would end the program without a word."""
    if isinstance(error, Exception):
        return error
    made = PersistError(f"the save was ended by {error!r}")
    made.__cause__ = error
    return made
