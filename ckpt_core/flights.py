"""The set of in-flight checkpoints: admits, finishes and times them out.

The finisher threads publish or clean up, and the watchdog thread fails what outlives its deadline, so that no
future stays open and no one waits for ever on a disk that hangs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

from ckpt_core.errors import CkptError, PersistError, StagingError
from ckpt_core.inflight import InFlight, Phase


class Flights:
    """The in-flight checkpoints: at most `limit`; owns the finisher threads and the watchdog thread.

    Args:
        limit: how many may be in flight.
        finish: publishes one that is complete, or cleans up one that failed; runs on a finisher thread.
        finishers: finisher threads; with several ranks one for each that may be in flight, since each
            may have to wait for other ranks, which are done with another one first.
    """

    def __init__(
        self, limit: int, *, finish: Callable[[InFlight], None], finishers: int = 1
    ) -> None:
        self._limit = limit
        self._finishers = finishers
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
                        f"committed: storage is stuck or far slower than the saves, or the other "
                        f"ranks do not save the same steps. Earlier steps "
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

    def is_staged(self, names: Iterable[str] | None, *, before: int | None) -> bool:
        """Whether training may change these leaves (None: all) of those of steps below `before` now."""
        names = None if names is None else tuple(names)
        return all(inflight.snapshot.is_clear(names) for inflight in self._of(before))

    def wait_staged(
        self, names: Iterable[str] | None, *, before: int | None, deadline: float
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

    def _of(self, before: int | None) -> list[InFlight]:
        return [flight for flight in self.active() if before is None or flight.step < before]

    def give_up_unsealed(self) -> None:
        """Fail the layer-wise ones whose caller never ended them."""
        for inflight in self.active():
            if inflight.is_open_ended:
                inflight.fail(
                    StagingError(f"step {inflight.step} was never sealed", step=inflight.step)
                )

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
        for _ in range(self._finishers):
            self._ready.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    # -- threads ---------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if self._threads:
            return
        jobs = [("finisher", self._run_finisher)] * self._finishers
        for name, target in (*jobs, ("watchdog", self._run_watchdog)):
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
    if inflight.phase is Phase.COMMITTING:
        return PersistError(
            f"step {inflight.step} may be committed or not (look at `steps()`): after {seconds:.1f} s "
            f"storage or another rank had not answered within `timeout`. Earlier steps are untouched; "
            f"training may go on",
            step=inflight.step,
        )
    return PersistError(
        f"step {inflight.step} was given up after {seconds:.1f} s while {inflight.phase.value}: storage "
        f"is stuck or too slow for `timeout`. Earlier steps are untouched; training may go on",
        step=inflight.step,
    )


def settle_all(flights: Iterable[InFlight]) -> None:
    """Give up every one of them. Called when the Checkpointer closes before they could end."""
    for inflight in flights:
        text = "the Checkpointer was closed while storage was stuck; earlier steps are untouched"
        unsure = inflight.phase is Phase.COMMITTING
        state = "may be committed or not (look at `steps()`)" if unsure else "was not saved"
        inflight.fail(PersistError(f"step {inflight.step} {state}: {text}"))
