"""Lets saves in, one place for each that may be in flight, and gives up those that their caller ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.observe import EventName
from ckpt_core.save.flights import Flights
from ckpt_core.save.in_flight import InFlight, Surroundings
from ckpt_core.save.journal import Journal, Underway
from ckpt_core.save.within_step import OwnBarriers
from ckpt_core.types import RAISED_TO_CALLER, Destination, check_step

_LATER_S = 1e-3


class Admission:
    """How each form of a save begins; used on the training thread.

    Args:
        own: optimizers that see to the barrier themselves.
        refuse: called before a wait; raises where the caller would wait for itself.
    """

    def __init__(
        self,
        around: Surroundings,
        flights: Flights,
        journal: Journal,
        own: OwnBarriers,
        timeout_s: float,
        *,
        refuse: Callable[[str], None],
    ) -> None:
        self.journal = journal
        self._around = around
        self._flights = flights
        self._own = own
        self._timeout_s = timeout_s
        self._refuse = refuse
        self._newest_unix_s = 0.0

    def announce(self, step: int, to: Callable[[], Destination] | None = None) -> InFlight:
        """The checkpoint that is about to be started: if the call ends in an error, so does it.

        Called first in a save, so that the other ranks, which may have begun theirs, hear of any error.

        Args:
            to: finds where named files go; None: it becomes a step.

        Raises:
            ConfigError: the step or the destination cannot be used, or a graph is being captured.
            CkptError: an earlier save failed in the background; this one is not started.
        """
        step = check_step(step)
        # An interrupt may come before there is any: the others have begun this attempt, and must hear of it.
        mine = self.journal.mine
        self.journal.note(partial(self._undo, mine, step, None))
        inflight = InFlight(step, self._around)
        self.journal.note(partial(self._undo, mine, step, inflight), inflight)
        inflight.attempt_id = self._around.coordination.attempt_id(step)
        inflight.destination = None if to is None else to()
        self.refuse_capture()
        self._around.failures.report(step)
        return inflight

    def refuse_capture(self) -> None:
        """Called first in what asks devices for anything.

        Raises:
            ConfigError: a graph is being captured.
        """
        if self._around.devices.is_capturing():
            raise ConfigError(
                "a graph is being captured, and nothing of a save may be in it: save, or prepare, after it"
            )

    def must_wait(self) -> bool:
        """Whether `admit` would block now."""
        return self._flights.full

    def admit(self, inflight: InFlight) -> None:
        """Start a checkpoint; blocks while as many as may be are in flight.

        Raises:
            StagingError: none of them ended within `timeout`.
            ConfigError: the Checkpointer was closed meanwhile; or no place is free, and none can be while a
                callback, or a signal handler, waits for one.
        """
        if self._flights.full:
            self._refuse("save")
        # Not before it has its place: the watchdog looks only at those.
        inflight.start_clock(self._timeout_s)
        self._flights.admit(inflight, deadline=inflight.deadline)
        inflight.start_clock(self._timeout_s)
        inflight.created_unix_s = self._now_unix_s()
        if inflight.destination is None:
            self._around.store.admitted(inflight.attempt_id)
        # Order matters: whatever interrupts the telling, whoever has heard of a begin hears of its end.
        inflight.begun = True
        self._around.events.tell(EventName.BEGIN, inflight.step, attempt=inflight.attempt_id)

    def is_behind_barrier(self) -> bool:
        """Whether the leaves handed over now may change before any barrier: then `wait_copied` follows."""
        return self._own.is_passed()

    def wait_copied(self, inflight: InFlight) -> None:
        """Return when training may change all leaves that have been handed over.

        Raises:
            StagingError: not within `timeout`.
        """
        began = time.monotonic()
        # It may take a while, and allocates nothing.
        self.journal.mine.resume_collector()
        snapshot = inflight.snapshot
        deadline = self._flights.patience(began + self._timeout_s)
        try:
            snapshot.wait(None, deadline=deadline)
        finally:
            # Also a wait that was in vain.
            seconds = time.monotonic() - began
            self._around.events.tell(EventName.WAITED, None, seconds=seconds)

    def sealed(self, inflight: InFlight) -> None:
        """Its caller has ended it: from now on it is the latest save of its step. May be called twice."""
        self._flights.sealed(inflight)
        if inflight.destination is None:
            self._around.store.admitted(inflight.attempt_id)

    def _now_unix_s(self) -> float:
        """Later for each save, since directories of files are ordered by it.

        The clock may be set back, and of several ranks' saves a later one may be published first.
        """
        self._newest_unix_s = max(time.time(), self._newest_unix_s + _LATER_S)
        return self._newest_unix_s

    def give_up(self, inflight: InFlight, error: BaseException) -> None:
        """End it from the training thread, which does not touch it again. Idempotent.

        The caller is told of `error`, so no later save raises it. Everything that must not be interrupted
        is done by other threads.
        """

        def end() -> None:
            inflight.reported = True
            inflight.fail(error)
            inflight.clean_up_soon()

        self._flights.do(end)

    def _undo(
        self, mine: Underway, step: int, inflight: InFlight | None, error: BaseException
    ) -> None:
        if error is self._flights.closed:
            mine.cut = self._flights.closed
        inflight = inflight or InFlight(step, self._around)
        inflight.attempt_id = inflight.attempt_id or self._around.coordination.attempt_id(step)
        self.give_up(inflight, CkptError(f"{RAISED_TO_CALLER}{type(error).__name__}: {error}"))
