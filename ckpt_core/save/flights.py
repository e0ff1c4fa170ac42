"""The set of in-flight checkpoints: admits, finishes and times them out.

The finisher threads publish or clean up, and the watchdog thread fails what outlives its deadline, so that no
future stays open and no one waits for ever on a disk that hangs.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from ckpt_core.errors import CkptError, ConfigError, PersistError, StagingError
from ckpt_core.save.closing import halfway
from ckpt_core.save.in_flight import InFlight, Phase
from ckpt_core.save.journal import Journal
from ckpt_core.system.threads import Monitor, Worker, join_all, start_all

_log = logging.getLogger("ckpt_core")

_CHORE_S = 2.0
_LOOK_S = 3600.0


class Flights:
    """The in-flight checkpoints: at most `limit`; owns the finisher threads and the watchdog thread.

    Args:
        limit: how many may be in flight.
        finish: publishes one that is complete, or cleans up one that failed; runs on a finisher thread.
        finishers: finisher threads; with several ranks one for each that may be in flight, since each
            may have to wait for other ranks, which are done with another one first.

    Attributes:
        closed: what whoever asks for a place is told, once none is given any more.
    """

    def __init__(
        self, limit: int, *, finish: Callable[[InFlight], None], finishers: int = 1
    ) -> None:
        self._limit = limit
        self._finishers = finishers
        self._finish = finish
        self._changed = Monitor()
        self._active: list[InFlight] = []
        self.closed: ConfigError | None = None
        self._looks_at = math.inf
        self._held: list[InFlight] = []
        self._ready: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._chores: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        jobs = [("finisher", self._run_finisher)] * finishers
        self.workers = [
            Worker(run, name=f"ckpt-{name}")
            for name, run in (*jobs, ("watchdog", self._run_watchdog))
        ]

    def start(self) -> None:
        """Start the threads. Called once, when the Checkpointer is made.

        Raises:
            PersistError: the system gives no more threads.
        """
        start_all(self.workers)

    def admit(self, inflight: InFlight, *, deadline: float) -> None:
        """Give a checkpoint its place; blocks while `limit` are in flight.

        Raises:
            StagingError: none of them ended before the deadline.
            ConfigError: `closed`, maybe while it waited.
        """

        looks = True

        def enter() -> bool:
            nonlocal looks
            if self.closed is not None:
                raise self.closed
            if self.full:
                return False
            self._active.append(inflight)
            looks = self._looks_at <= inflight.deadline
            return True

        if not self._changed.wait_for(enter, deadline=self.patience(deadline)):
            steps = ", ".join(str(flight.step) for flight in self.active())
            raise StagingError(
                f"in_flight={self._limit} checkpoints (steps {steps}) are still not committed: storage "
                f"is stuck or far slower than the saves, or the other ranks do not save the same steps. "
                f"Earlier steps are untouched; save less often, "
                f"or raise in_flight or timeout"
            )
        if not looks:
            # The watchdog learns of its deadline. Most of the time it has one from an earlier checkpoint, at
            # which it looks again: to wake it takes longer, and the interpreter's lock from this thread.
            self._chores.put(_nothing)

    def patience(self, deadline: float) -> float:
        """Until when to wait for those in flight: where one is due by the deadline, a moment longer, since
        the watchdog is about to give it up.
        """
        due = any(flight.deadline <= deadline for flight in self.active())
        return deadline + _CHORE_S if due else deadline

    def do(self, chore: Callable[[], None]) -> None:
        """Run `chore`, which does not block, on the watchdog's thread, where no interrupt comes.

        Returns when it is done, or after some seconds: whoever listens to events may dawdle.
        """
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            try:
                chore()
            finally:
                done.release()

        self._chores.put(run)
        done.acquire(timeout=_CHORE_S)

    def ready(self, inflight: InFlight) -> None:
        """Nothing is staged or written for it any more: let the finisher have it.

        Not before an older save of the same step has ended, which would take its place.
        """
        with self._changed.lock:
            if self._overtakes(inflight):
                self._held.append(inflight)
                return
        self._ready.put(inflight)

    def sealed(self, inflight: InFlight) -> None:
        """Its caller has ended it: it is younger than what was started meanwhile. Idempotent."""
        with self._changed.lock:
            if inflight in self._active:
                # One assignment: no interrupt comes within it, and whoever takes no lock sees a whole list.
                self._active = [*(one for one in self._active if one is not inflight), inflight]

    def _overtakes(self, inflight: InFlight) -> bool:
        """Whether an older save of the step is in flight; directories have an order of their own."""
        if inflight.destination is not None or inflight not in self._active:
            return False
        older = self._active[: self._active.index(inflight)]
        # One that its caller has not sealed yet is not older: nobody knows when it ends.
        older = [one for one in older if one.destination is None and not one.open_ended]
        return any(one.step == inflight.step for one in older)

    def active(self) -> tuple[InFlight, ...]:
        """Those in flight, oldest first."""
        with self._changed.lock:
            return tuple(self._active)

    def not_empty(self) -> StagingError:
        """For whoever has waited in vain: which steps are in flight, at which stage, and for how long."""
        now = time.monotonic()
        found = ", ".join(
            f"step {flight.step}, {flight.phase.value} for {now - flight.began:.1f} s"
            for flight in self.active()
        )
        found = found or "memory that is page-locked behind `prepare`"
        return StagingError(
            f"still in flight after `timeout`: {found}. Committed steps are safe, and these go on. Look for "
            f"storage that hangs, or a rank that does not save the same steps; seal or abort what was begun, "
            f"or raise `timeout`"
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight. Takes no lock: it is asked at every step of an optimizer."""
        return not self._active

    @property
    def full(self) -> bool:
        """Whether as many are in flight as may be. Takes no lock: only one thread starts any."""
        return len(self._active) >= self._limit

    def is_staged(self, names: Iterable[str] | None, *, before: int | InFlight | None) -> bool:
        """Whether training may change these leaves (None: all) of those of steps below `before` now, or of
        all but that one.
        """
        names = None if names is None else tuple(names)
        return all(inflight.snapshot.is_clear(names) for inflight in self._of(before))

    def wait_staged(
        self, names: Iterable[str] | None, *, before: int | InFlight | None, deadline: float
    ) -> bool:
        """Wait until `is_staged`; whether it took a wait.

        Raises:
            StagingError: not before the deadline.
        """
        names = None if names is None else tuple(names)
        waited = False
        for inflight in self._of(before):
            if not inflight.snapshot.is_clear(names):
                waited = True
                inflight.snapshot.wait(names, deadline=deadline)
        return waited

    def _of(self, before: int | InFlight | None) -> list[InFlight]:
        if isinstance(before, int):
            return [flight for flight in self.active() if flight.step < before]
        return [flight for flight in self.active() if flight is not before]

    def refuse_unsealed(self, by: int | None = None) -> None:
        """Before the caller waits for what only the caller can end.

        Args:
            by: of those that this thread began alone: another one may end its own meanwhile.

        Raises:
            ConfigError: a save was begun and neither sealed nor aborted.
        """
        for inflight in self.active():
            mine = by is None or by == inflight.thread
            if mine and inflight.open_ended and not inflight.failed():
                raise ConfigError(
                    f"the save of step {inflight.step} was begun and is not sealed: seal or abort it first"
                )

    def refuse_within(self, journal: Journal, call: str) -> None:
        """Before a call that waits until fewer are in flight.

        Raises:
            ConfigError: it is made inside a save, which is one of them, or before that is sealed, and would
                wait for itself.
        """
        if call == "wait":
            self.refuse_unsealed(threading.get_ident())
        if journal.is_inside and any(one in self._active for one in journal.mine.making):
            raise halfway(call)

    def give_up_unsealed(self) -> None:
        """Fail the open ones whose caller never ended them."""
        for inflight in self.active():
            if inflight.open_ended:
                error = StagingError(f"step {inflight.step} was never sealed", step=inflight.step)
                self.do(partial(inflight.fail, error))

    def settle_all(self, why: str) -> None:
        """Give up those that could not end before the Checkpointer closes."""
        for inflight in self.active():
            unsure = inflight.phase is Phase.COMMITTING
            state = "may be committed or not (look at `steps()`)" if unsure else "was not saved"
            error = PersistError(
                f"step {inflight.step} {state}: {why}; earlier steps are untouched"
            )
            self.do(partial(inflight.fail, error))

    def wait_empty(self, *, deadline: float) -> bool:
        """Wait until none is in flight; False when the deadline passed first."""
        return self._changed.wait_for(lambda: not self._active, deadline=deadline)

    def close(self, *, timeout_s: float) -> None:
        """End the threads; one that hangs is left behind after `timeout_s`. Idempotent."""
        self._chores.put(None)
        for _ in self.workers[:-1]:
            self._ready.put(None)
        join_all(self.workers, timeout_s=timeout_s)

    # -- threads ---------------------------------------------------------------------------------

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
        while True:
            try:
                chore = self._chores.get(timeout=self._next_due_s())
            except queue.Empty:
                self._expire()
                continue
            if chore is None:
                return
            try:
                chore()
            except BaseException:  # the thread outlives any chore
                _log.exception("a chore of the watchdog failed")
            del chore

    def _next_due_s(self) -> float | None:
        # Together: a checkpoint is either among those that count here, or sees when this thread looks.
        with self._changed.lock:
            deadlines = [flight.deadline for flight in self._active]
            self._looks_at = nearest = min(deadlines, default=math.inf)
        # No longer: the queue takes no wait of years.
        return min(max(nearest - time.monotonic(), 0.0), _LOOK_S) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        for inflight in self.active():
            if inflight.deadline <= now:
                inflight.fail(_overdue(inflight))
                self._retired(inflight)

    def _retired(self, inflight: InFlight) -> None:
        with self._changed.lock:
            if inflight in self._active:
                self._active.remove(inflight)
                self._changed.notify_all()
            free = [one for one in self._held if not self._overtakes(one)]
            self._held = [one for one in self._held if one not in free]
        for one in free:
            self._ready.put(one)


def _overdue(inflight: InFlight) -> CkptError:
    seconds = time.monotonic() - inflight.began
    if inflight.phase is Phase.COMMITTING:
        return PersistError(
            f"step {inflight.step} may be committed or not (look at `steps()`): storage is stuck or too "
            f"slow, or another rank is, or this process was stopped: {seconds:.1f} s are over, and "
            f"`timeout`. Earlier steps are untouched; training may go on",
            step=inflight.step,
        )
    if inflight.open_ended:
        return PersistError(
            f"step {inflight.step} was given up after {seconds:.1f} s: it was begun and not sealed within "
            f"`timeout`: seal or abort what is begun. Earlier steps are untouched; training may go on",
            step=inflight.step,
        )
    return PersistError(
        f"step {inflight.step} was given up after {seconds:.1f} s while {inflight.phase.value}: storage "
        f"is stuck or too slow for `timeout`, or this process was stopped meanwhile. Earlier steps are "
        f"untouched; training may go on",
        step=inflight.step,
    )


def _nothing() -> None:
    """A chore that only has the watchdog look at the clock again."""
