"""Lets saves in, one place for each that may be in flight, and tells what becomes of them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

from ckpt_core.coordination import Coordination
from ckpt_core.errors import CkptError
from ckpt_core.flights import Flights
from ckpt_core.inflight import Hooks, InFlight
from ckpt_core.observe import EventLog, EventName
from ckpt_core.options import Options
from ckpt_core.store import Attempt, GuestStore, StepStore
from ckpt_core.together import Failures, refusal_behind
from ckpt_core.types import Destination

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
    ) -> None:
        self._store = store
        self._flights = flights
        self._events = events
        self._failures = failures
        self._timeout_s = options.timeout_s
        self._coordination = coordination
        self._hooks = Hooks(
            self._make_attempt, self._refusal, flights.ready, self._note_failure, failures.forget
        )

    def admit(self, step: int, attempt_id: str, destination: Destination | None = None) -> InFlight:
        """Start a checkpoint; blocks while as many as may be are in flight.

        Raises:
            StagingError: none of them ended within `timeout`.
        """

        def make() -> InFlight:
            deadline = time.monotonic() + self._timeout_s
            root = self._store.root
            if destination is None:
                self._store.admitted(attempt_id)
            return InFlight(
                step,
                attempt_id,
                root=root,
                deadline=deadline,
                hooks=self._hooks,
                destination=destination,
            )

        inflight = self._flights.admit(make, deadline=time.monotonic() + self._timeout_s)
        self._events.tell(EventName.BEGIN, step)
        inflight.snapshot.staged.add_done_callback(
            lambda staged: self._note_staged(inflight, staged)
        )
        return inflight

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

    def _note_staged(self, inflight: InFlight, staged: Future[None]) -> None:
        if staged.exception() is None:
            seconds = time.monotonic() - inflight.began
            self._events.tell(EventName.STAGED, inflight.step, seconds=seconds)

    def _note_failure(self, inflight: InFlight) -> None:
        assert inflight.error is not None
        _log.error("save of step %d failed: %s", inflight.step, inflight.error)
        self._events.tell(EventName.FAILED, inflight.step, detail=str(inflight.error))
        self._failures.note(inflight.error)
