"""Fixed intervals, in steps and in time, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.policy.base import Policy
from ckpt_core.policy.meter import Gauges, gauges_of
from ckpt_core.types import check_step
from ckpt_core.units import parse_duration

_MOST_GROWTH = 2


class EveryNSteps(Policy):
    """Saves at the multiples of `n_steps`, counted from step 0, however training was started.

    Resume: the first question sets the origin. Asked first at step 950, `EveryNSteps(100)` saves at
    1000, as the run before would have done. Steps may jump: a multiple that was jumped over is made
    up for at the next step asked about, once. Step 0 itself is not saved.
    """

    def __init__(self, n_steps: int) -> None:
        """Raises ConfigError unless `n_steps` is an int of at least 1."""
        given: object = n_steps
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(f"n_steps={n_steps!r} must be an int of at least 1")
        self.n_steps = given
        self._next: int | None = None
        self._seen = -1

    def __repr__(self) -> str:
        return f"EveryNSteps({self.n_steps})"

    def _is_regular(self) -> bool:
        return True

    def due(self, step: int) -> bool:
        if self._next is None or step < self._seen:
            self._next = max(-(-step // self.n_steps), 1) * self.n_steps
        self._seen = step
        return step >= self._next

    def saved(self, step: int) -> None:
        self._next = (step // self.n_steps + 1) * self.n_steps


class LastStep(Policy):
    """Saves at the last step of a run, which an interval may miss: `EveryNSteps(100) | LastStep(250)`."""

    def __init__(self, step: int) -> None:
        """Raises ConfigError unless `step` is an int of at least 0."""
        self.step = check_step(step)
        self._is_saved = False

    def __repr__(self) -> str:
        return f"LastStep({self.step})"

    def due(self, step: int) -> bool:
        if step < self.step:
            self._is_saved = False
        return step >= self.step and not self._is_saved

    def saved(self, step: int) -> None:
        self._is_saved = step >= self.step


class EverySeconds(Policy):
    """Saves when at least `duration` has passed since the last save.

    Resume: the first question sets the origin, so time spent before training is not counted, and
    the first save comes one `duration` later.

    Several ranks: clocks differ, and all must save the same steps: `watch(checkpointer)` before the first
    step, as with `Auto`, lets the first rank decide. Integrations see to that themselves.
    """

    def __init__(
        self, duration: timedelta | float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError unless `duration` is a timedelta or seconds, above zero."""
        self.duration = parse_duration(duration, field="duration")
        self._clock = clock
        self._since_s: float | None = None
        self._gauges: Gauges | None = None
        self._met: tuple[int, float] | None = None
        self._next = 0
        self._is_due = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy sees no engine."""
        return {**self.__dict__, "_gauges": None}

    def __repr__(self) -> str:
        return f"EverySeconds({self.duration.total_seconds():g})"

    def watch(self, checkpointer: Any, *, agree: bool = True) -> None:
        self._see(checkpointer, agree=agree)
        self._look_at_levels(checkpointer)

    def _is_regular(self) -> bool:
        return False

    def _see(self, checkpointer: Any, *, agree: bool) -> None:
        gauges = gauges_of(checkpointer) if agree else None
        self._gauges = gauges if gauges is not None and gauges.world_size > 1 else None
        self._met, self._next, self._is_due = None, 0, False

    def due(self, step: int) -> bool:
        """Raises CoordinationTimeout, CommitError: of several ranks, the first one did not say."""
        if self._gauges is None:
            return self._left_s(self._clock()) <= 0
        if self._met is not None and step < self._met[0]:
            self._met, self._next = None, step  # training went back, on every rank
        if not self._is_due and step >= self._next:
            self._meet(self._gauges, step)
        return self._is_due

    def saved(self, step: int) -> None:
        self._since_s = self._clock()
        self._next, self._is_due = step + 1, False

    def _left_s(self, now_s: float) -> float:
        if self._since_s is None:
            self._since_s = now_s
        return self._since_s + self.duration.total_seconds() - now_s

    def _meet(self, gauges: Gauges, step: int) -> None:
        """The first rank says whether a save is due, and at which step it is to be asked again."""
        now_s = self._clock()
        left_s, ahead = self._left_s(now_s), 1
        if self._met is not None and self._met[0] < step:
            steps, passed_s = step - self._met[0], now_s - self._met[1]
            # Few meetings, and none so far away that slower iterations make the save late by much.
            most = _MOST_GROWTH * steps
            ahead = min(max(int(left_s * steps / passed_s), 1), most) if passed_s > 0 else most
        self._is_due, ahead = gauges.of_first_rank("seconds", [left_s <= 0, ahead])
        self._met, self._next = (step, now_s), step + ahead
