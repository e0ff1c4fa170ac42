"""Lets saves in, one place for each that may be in flight, and tells what becomes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from ckpt_core.coordination import Coordination
from ckpt_core.errors import CkptError
from ckpt_core.observe import EventLog, EventName
from ckpt_core.options import Options
from ckpt_core.save.failures import Failures, refusal_behind
from ckpt_core.save.flights import Flights
from ckpt_core.save.in_flight import Hooks, InFlight
from ckpt_core.save.journal import Journal
from ckpt_core.store import Attempt, GuestStore, StepStore
from ckpt_core.types import RAISED_TO_CALLER

_log = logging.getLogger("ckpt_core")


class Admission:
    """What a Checkpointer asks for a place; used on the training thread."""

    def __init__(
        self,
        store: StepStore | GuestStore,
        flights: Flights,
        events: EventLog,
        failures: Failures,
        options: Options,
        *,
        coordination: Coordination,
        journal: Journal,
        stage: Callable[[Callable[[], None]], None],
    ) -> None:
        self._store = store
        self._flights = flights
        self._events = events
        self._failures = failures
        self._timeout_s = options.timeout_s
        self._coordination = coordination
        self._journal = journal
        self._stage = stage
        self._hooks = Hooks(
            make_attempt=self._make_attempt,
            give_up=self._give_up,
            clean_up=self._clean_up,
            refusal=self._refusal,
            on_staged=self._note_staged,
            on_ready=flights.ready,
            on_failed=self._note_failure,
            on_raised=failures.forget,
        )

    def announce(self, step: int) -> InFlight:
        """The checkpoint that is about to be started: if the call ends in an error, so does it.

        Called first in a save, so that the other ranks, which may have begun theirs, hear of any error.
        """
        # An interrupt may come before there is any: the others have begun this attempt, and must hear of it.
        self._journal.note(partial(self._undo, step, None))
        inflight = InFlight(step, root=self._store.root, hooks=self._hooks)
        self._journal.note(partial(self._undo, step, inflight))
        inflight.attempt_id = self._coordination.attempt_id(step)
        return inflight

    def admit(self, inflight: InFlight) -> None:
        """Start a checkpoint; blocks while as many as may be are in flight.

        Raises:
            StagingError: none of them ended within `timeout`.
        """
        # Not before it has its place: the watchdog looks only at those.
        inflight.start_clock(self._timeout_s)
        self._flights.admit(inflight, deadline=inflight.deadline)
        inflight.start_clock(self._timeout_s)
        if inflight.destination is None:
            self._store.admitted(inflight.attempt_id)
        self._events.tell(EventName.BEGIN, inflight.step)

    def _undo(self, step: int, inflight: InFlight | None, error: BaseException) -> None:
        inflight = inflight or InFlight(step, root=self._store.root, hooks=self._hooks)
        inflight.attempt_id = inflight.attempt_id or self._coordination.attempt_id(step)
        self._give_up(inflight, CkptError(f"{RAISED_TO_CALLER}{type(error).__name__}: {error}"))

    def _give_up(self, inflight: InFlight, error: BaseException) -> None:
        def end() -> None:
            inflight.reported = True
            inflight.fail(error)
            self._clean_up(inflight)

        self._flights.do(end)

    def _clean_up(self, inflight: InFlight) -> None:
        self._stage(inflight.clean_up)

    def _make_attempt(self, inflight: InFlight) -> Attempt:
        if inflight.destination is None:
            # A newer valid step is coming: what was found corrupt must not stand as the newest any more.
            self._store.quarantine_suspects()
        self._store.check_space(inflight.file_bytes)
        return self._store.begin(inflight.step, inflight.attempt_id, inflight.destination)

    def _refusal(self, inflight: InFlight, error: BaseException) -> CkptError | None:
        left = inflight.deadline - time.monotonic()
        return refusal_behind(
            self._coordination, inflight.attempt_id, inflight.step, error, left_s=left
        )

    def _note_staged(self, inflight: InFlight) -> None:
        seconds = time.monotonic() - inflight.began
        self._events.tell(EventName.STAGED, inflight.step, seconds=seconds)

    def _note_failure(self, inflight: InFlight) -> None:
        assert inflight.error is not None
        _log.error("save of step %d failed: %s", inflight.step, inflight.error)
        self._events.tell(EventName.FAILED, inflight.step, detail=str(inflight.error))
        self._failures.note(inflight.error)
