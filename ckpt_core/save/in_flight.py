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
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType

from ckpt_core.coordination import Coordination
from ckpt_core.errors import CkptError, PersistError, RestoreError
from ckpt_core.observe import EventLog, EventName
from ckpt_core.persist import ShardFile
from ckpt_core.save.contents import Contents
from ckpt_core.save.failures import Failures
from ckpt_core.save.further import Followed, NoLevels, Reaching
from ckpt_core.save.still_group import Keeper
from ckpt_core.snapshot import ShardImage, Snapshot, Stager, StagingPool
from ckpt_core.store import Attempt, GuestStore, StepStore
from ckpt_core.system.devices import Devices
from ckpt_core.system.threads import ThreadFuture, own_lock
from ckpt_core.types import Destination

_log = logging.getLogger("ckpt_core")

_REFUSED_WITHIN_S = 5.0
"""Who gives an attempt up tells the others at once, and removes its files meanwhile."""


class Phase(Enum):
    """Where an in-flight checkpoint is."""

    STAGING = "staging"
    PERSISTING = "persisting"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every save of a Checkpointer finds around it.

    Attributes:
        store: where it becomes visible.
        coordination: the other ranks.
        events: told what becomes of it.
        failures: told when it is given up.
        stager: gives back its memory, behind all that is staged for it.
        devices: where its leaves may lie.
        on_ready: called once when nothing is being staged or written for it any more.
        levels: where it may go from there.
    """

    store: StepStore | GuestStore
    coordination: Coordination
    events: EventLog
    failures: Failures
    stager: Stager
    devices: Devices
    on_ready: Callable[[InFlight], None]
    levels: NoLevels


class InFlight:
    """A started checkpoint that has not ended yet. Thread-safe. Making one starts nothing.

    Args:
        step: the step it is of.
        around: see there.

    Attributes:
        attempt_id: names this try; the same on all ranks; "" before it is drawn.
        destination: where named files go; None: it becomes a step.
        images: everything that may hold chunks for it.
        open_ended: it waits for its caller, and only the stager touches its images.
        thread: of its caller.
        stills: the files of it that later ones may share, who keeps them, and how some leaves look.
        begun: BEGIN is told of it, so that its end must be too.
        created_unix_s: when it was let in, later than the one before it.
    """

    def __init__(self, step: int, around: Surroundings) -> None:
        self.step = step
        self.destination: Destination | None = None
        self.attempt_id = ""
        self.began = self.deadline = time.monotonic()
        self.created_unix_s = 0.0
        self.snapshot = Snapshot(step, devices=around.devices, on_staged=self._note_staged)
        self.committed: Future[Path] = ThreadFuture()
        self.shards: list[ShardFile] = []
        self.stills: list[tuple[Keeper, ShardFile, Mapping[str, bytes]]] = []
        self.images: list[ShardImage] = []
        self.attempt: Attempt | None = None
        self.error: BaseException | None = None
        self.contents: Contents | None = None
        self.begun = self.reported = False
        self.voted = False
        self._around = around
        self._lock = own_lock()
        # Apart from _lock: making the directory may hang on storage, and failing must not.
        self._making = own_lock()
        self.open_ended = False
        self.thread = threading.get_ident()
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
                self.attempt = self._make()
            return self.attempt

    def _make(self) -> Attempt:
        store = self._around.store
        if self.destination is None:
            # A newer valid step is coming: what was found corrupt must not stand as the newest any more.
            try:
                store.quarantine_suspects()
            except (PersistError, RestoreError) as exc:
                # Restore passes over it where it stands: that is no reason to save nothing.
                _log.warning("%s A corrupt step stays where it is; the save goes on", exc)
        written = [shard for shard in self.shards if shard.expected_bytes]
        store.check_space(
            *(shard.expected_bytes for shard in written if shard.request.takes_slot),
            others_bytes=sum(s.expected_bytes for s in written if not s.request.takes_slot),
        )
        return store.begin(self.step, self.attempt_id, self.destination)

    def start_clock(self, timeout_s: float) -> None:
        """It begins now; the watchdog fails it when `timeout_s` are over."""
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s

    def clean_up_soon(self) -> None:
        """Have `clean_up` called where it belongs. Nobody stages anything for it from here on."""
        self._around.stager.submit(self.clean_up)

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
            left_open = self.open_ended
        # Not of one that users have been told: it has come through theirs.
        _let_go_of_frames(error)
        if self.begun or not told:
            attempt = self.attempt_id or None
            self._around.events.tell(
                EventName.FAILED, self.step, attempt=attempt, detail=str(error)
            )
        if not told:
            # Order matters: whoever has waited for a future finds the failure at the next save.
            self._around.failures.note(self.step, error)
        self.snapshot.fail(error)
        self.committed.set_exception(error)
        self._ended.release()
        if left_open:
            self.clean_up_soon()

    def explained(self, error: BaseException) -> BaseException:
        """The error, or what another rank had failed with when that is behind it.

        Called from background threads; returns within some seconds, and before the deadline.
        """
        if not isinstance(error.__cause__, FileNotFoundError):
            return error
        within_s = min(max(self.deadline - time.monotonic(), 0.0), _REFUSED_WITHIN_S)
        refusal = self._around.coordination.refusal(self.attempt_id, self.step, within_s)
        if refusal is None:
            return error
        refusal.__cause__ = error
        return refusal

    def _place(self, error: BaseException) -> None:
        if isinstance(error, CkptError):
            error.step = self.step if error.step is None else error.step
            attempt = self.attempt
            place = self._around.store.root if attempt is None else attempt.path
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

    def let_go(self) -> None:
        """Drop all that was made for it, which knows it in turn. Called by the finisher, behind `succeed`.

        Else only the garbage collector would free it, which stops training.
        """
        self.images, self.shards, self.stills = [], [], []

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
            self._around.failures.forget(exc)
            raise

    def reaching(self) -> Reaching:
        """For its handle."""
        save = Followed(self.step, self.attempt_id, self.committed, self.destination)
        return self._around.levels.follow(save)

    def _note_staged(self) -> None:
        seconds = time.monotonic() - self.began
        attempt = self.attempt_id
        self._around.events.tell(EventName.STAGED, self.step, attempt=attempt, seconds=seconds)

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
            self._around.on_ready(self)

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
            self._around.on_ready(self)


def _to_report(error: BaseException) -> BaseException:
    """Raised in a later call, as it is, the end of a thread would end the program without a word."""
    if isinstance(error, Exception):
        return error
    made = PersistError(f"the save was ended by {error!r}")
    made.__cause__ = error
    return made


def _let_go_of_frames(error: BaseException) -> None:
    """What the functions that it came through had in hand, clones and pieces, is free; their lines stay.

    Whoever handles it is still at work, and not in it any more: each of them knows the save, which has the
    error, and only the garbage collector would free such a circle.
    """
    seen, chain = set[int](), [error]
    while chain:
        one = chain.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        chain += filter(None, (one.__cause__, one.__context__))
        came = one.__traceback__
        while came is not None and _is_at_work(came.tb_frame):
            came = came.tb_next
        one.__traceback__ = came
        traceback.clear_frames(came)


def _is_at_work(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
