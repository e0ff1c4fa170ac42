"""What each save has cost, as numbers for the loggers of a framework, and a summary of a run.

Numbers come from the engine's events and from the clock: no device is asked, nothing synchronizes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_core.observe.event import Event, EventName
from ckpt_core.system.threads import own_lock


@dataclass(slots=True)
class SaveCost:
    """What one save cost.

    Attributes:
        step: the step that was saved.
        interval_steps: steps since the save before.
        stall_s: time that the training thread lost, in the save and at the barriers after it.
        staged_s: from the start until the snapshot was out of the way of training.
        persist_s: from the start until all bytes were durable; 0.0 when it failed.
        nbytes: size of the state.
        in_flight: saves under way right after this one was started.
        failures: saves of this fit that had failed by its end.
    """

    step: int
    interval_steps: int
    stall_s: float
    in_flight: int
    staged_s: float = 0.0
    persist_s: float = 0.0
    nbytes: int = 0
    failures: int = 0

    def as_metrics(self) -> dict[str, float]:
        """As loggers take them: plain numbers, by names that begin with `ckpt/`."""
        return {
            "ckpt/stall_ms": self.stall_s * 1000,
            "ckpt/staged_ms": self.staged_s * 1000,
            "ckpt/persist_s": self.persist_s,
            "ckpt/bytes": float(self.nbytes),
            "ckpt/bytes_per_s": self.nbytes / self.persist_s if self.persist_s else 0.0,
            "ckpt/interval_steps": float(self.interval_steps),
            "ckpt/in_flight": float(self.in_flight),
            "ckpt/failures": float(self.failures),
        }


_HEARD = {
    *(EventName.BEGIN, EventName.STAGED, EventName.PERSISTED),
    *(EventName.COMMITTED, EventName.FAILED, EventName.WAITED),
}


_Named = tuple[int | None, str | None]
"""A save: its step, and its attempt where events tell it."""


class Meter:
    """Gathers what saves cost, for whoever logs it.

        meter = Meter()
        ck.events.subscribe(meter.on_event)
        ...
        with meter.saving(step):
            ck.save(step, state)
        for cost in meter.take():
            logger.log(cost.as_metrics())

    `on_event` may be called from any thread, the rest from training.

    Attributes:
        newest: the newest step that was committed.
    """

    def __init__(self) -> None:
        self._lock = own_lock()
        self._open: dict[_Named, SaveCost] = {}
        self._calling: int | None = None
        self._attempt: str | None = None
        self._early: list[Event] = []
        self._done: deque[SaveCost] = deque()
        self._begun_last: SaveCost | None = None
        self._last_step = 0
        self.newest: int | None = None
        self.saves = 0
        self.failures = 0
        self.stall_s = 0.0
        self.most_stall_s = 0.0
        self.nbytes = 0
        self.busy_s = 0.0

    def resumed(self, step: int) -> None:
        """Training goes on from `step`: the first interval counts from there."""
        self._last_step = step

    @contextmanager
    def saving(self, step: int, *, began_s: float | None = None) -> Iterator[None]:
        """Around the call that starts a save; what the call raises is passed on.

        Args:
            began_s: when training began to wait for it, on the monotonic clock; None: now.
        """
        began_s = time.monotonic() if began_s is None else began_s
        with self._lock:
            self._calling, self._attempt, self._early = step, None, []
        try:
            yield
        except BaseException:
            self._refused(step, stall_s=time.monotonic() - began_s)
            raise
        self._begun(step, stall_s=time.monotonic() - began_s)

    def on_event(self, event: Event) -> None:
        """Hear an event of the engine."""
        if event.name not in _HEARD:
            return
        with self._lock:
            self._hear(event)

    def take(self) -> list[SaveCost]:
        """The saves that were committed since the last call, in the order of their commits."""
        with self._lock:
            done = list(self._done)
            self._done.clear()
        return done

    def summary(self) -> str:
        """One sentence about all saves of this fit."""
        if not self.saves and not self.failures:
            return "no step was saved"
        rate = self.nbytes / self.busy_s / 1e9 if self.busy_s else 0.0
        steps = "step" if self.saves == 1 else "steps"
        text = (
            f"{self.saves} {steps} saved, the last is {self._last_step}; training waited "
            f"{self.stall_s * 1000:.0f} ms in all, gathering its state included, "
            f"{self.most_stall_s * 1000:.1f} ms at most for one; "
            f"{self.nbytes / 1e9:.3f} GB at {rate:.2f} GB/s"
        )
        saves = "save" if self.failures == 1 else "saves"
        return text + (f"; {self.failures} {saves} failed" if self.failures else "")

    def _hear(self, event: Event) -> None:
        named = event.step, event.attempt
        cost = self._open.get(named)
        if event.name == EventName.WAITED:
            # At a barrier, because of the newest save.
            if self._begun_last is not None:
                self._begun_last.stall_s += event.seconds
        elif event.name == EventName.BEGIN:
            if event.step == self._calling:
                # What was told until now was of another save of the step, which nobody measures.
                self._early.clear()
                self._attempt = event.attempt
        elif cost is None:
            if event.step == self._calling:
                self._early.append(event)
        elif event.name == EventName.STAGED:
            cost.staged_s = event.seconds
        elif event.name == EventName.PERSISTED:
            cost.persist_s, cost.nbytes = event.seconds, event.nbytes
        else:
            del self._open[named]
            self._end(cost, failed=event.name == EventName.FAILED)

    def _begun(self, step: int, *, stall_s: float) -> None:
        cost = SaveCost(step, step - self._last_step, stall_s, 0)
        self._last_step = step
        with self._lock:
            self._open[step, self._attempt] = self._begun_last = cost
            for event in self._told():
                self._hear(event)
            cost.in_flight = len(self._open)

    def _told(self) -> list[Event]:
        """What the engine has told of the save whose call is over."""
        told, self._early, self._calling = self._early, [], None
        # Another save of the step, which nobody measures, may go on behind the call.
        return [event for event in told if event.attempt == self._attempt]

    def _refused(self, step: int, *, stall_s: float) -> None:
        """The call has raised: at once, or, with `blocking`, after all that the engine told of the save."""
        with self._lock:
            if EventName.FAILED in [event.name for event in self._told()]:
                self._end(SaveCost(step, step - self._last_step, stall_s, 0), failed=True)
                self._last_step = step

    def _end(self, cost: SaveCost, *, failed: bool) -> None:
        self.stall_s += cost.stall_s
        self.most_stall_s = max(self.most_stall_s, cost.stall_s)
        if failed:
            self.failures += 1
            return
        self.saves += 1
        self.newest = max(cost.step, self.newest or 0)
        self.nbytes += cost.nbytes
        self.busy_s += cost.persist_s
        cost.failures = self.failures
        self._done.append(cost)
