"""Fixed intervals, in steps and in time, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from ckpt_core.errors import ConfigError
from ckpt_core.policy.base import Policy
from ckpt_core.types import check_step
from ckpt_core.units import parse_duration


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
    """

    def __init__(
        self, duration: timedelta | float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError unless `duration` is a timedelta or seconds, above zero."""
        self.duration = parse_duration(duration, field="duration")
        self._clock = clock
        self._since_s: float | None = None

    def __repr__(self) -> str:
        return f"EverySeconds({self.duration.total_seconds():g})"

    def due(self, step: int) -> bool:
        if self._since_s is None:
            self._since_s = self._clock()
        return self._clock() - self._since_s >= self.duration.total_seconds()

    def saved(self, step: int) -> None:
        self._since_s = self._clock()
