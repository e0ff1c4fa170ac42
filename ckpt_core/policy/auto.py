"""When to save, found out by measuring, and kept within the user's bound while the load changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.policy.base import Policy
from ckpt_core.policy.interval import Interval, Limits, Reason
from ckpt_core.policy.meter import Meter, gauges_of
from ckpt_core.policy.planner import Planner, next_look
from ckpt_core.policy.profile import Profile, ProfileCache
from ckpt_core.units import parse_count, parse_duration


class Auto(Policy):
    """Saves as often as `max_overhead` allows, and adapts when costs change.

    Measures how long iterations take with and without checkpoint activity, and what each save adds to them.
    The next save comes when the one before is amortised, so that the bound holds for each interval by itself.
    It needs to see the engine: `watch(checkpointer)` before the first step; integrations do that themselves.

    Args:
        max_overhead: share of training time that saves may add, above 0 and at most 1.
        mtbf: mean time between failures of the whole job (timedelta or seconds). Where the Young-Daly optimum
            is longer than the interval that the bound allows, it is taken.
        min_steps, max_steps: bounds of the interval; `max_steps` wins over `max_overhead`, and holds from the
            first save on, which comes after 8 steps.
        cache: keep what was measured beside the root, for the next start.
        clock: seconds, monotonic; for tests.

    Raises:
        ConfigError: an argument is wrong.

    Source: CheckFreq (FAST '21) sections 4.2 and 4.3, PCcheck (ASPLOS '25) section 3.4, Daly (FGCS 2006).
    """

    def __init__(
        self,
        max_overhead: float = 0.05,
        mtbf: timedelta | float | None = None,
        *,
        min_steps: int = 1,
        max_steps: int | None = None,
        cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = Limits(
            max_overhead=_checked_share(max_overhead),
            mtbf_s=None if mtbf is None else parse_duration(mtbf, field="mtbf").total_seconds(),
            min_steps=parse_count(min_steps, field="min_steps"),
            max_steps=None if max_steps is None else parse_count(max_steps, field="max_steps"),
        )
        self._caches = cache
        self._clock = clock
        self._agrees = False
        self._meter: Meter | None = None
        self._planner: Planner | None = None
        self._told: Interval | None = None
        self._asked: int | None = None
        self._next = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy sees no engine: it has measured nothing yet, and asks to be let `watch` one."""
        return {**self.__dict__, "_meter": None, "_planner": None}

    def __repr__(self) -> str:
        now = "" if self.interval is None else f", now {self.interval.steps} steps"
        return f"Auto(max_overhead={self._limits.max_overhead:g}{now})"

    def watch(self, checkpointer: Any, *, agree: bool = True) -> None:
        """See what saves cost. Called on every rank before the first step, again for another Checkpointer.

        Args:
            checkpointer: the `ckpt_core.Checkpointer` that saves.
            agree: with several ranks, let the first one decide for all. Every rank then asks at every step.
                False where the caller sees to that itself.

        Raises:
            ConfigError: it is no Checkpointer.
        """
        self._see(checkpointer, agree=agree)
        self._look_at_levels(checkpointer)

    def _see(self, checkpointer: Any, *, agree: bool) -> None:
        gauges = gauges_of(checkpointer)
        if self._meter is not None:
            self._meter.close()
        cache = ProfileCache(gauges.root, gauges.machine()) if self._caches else None
        self._meter = Meter(gauges)
        limits = replace(self._limits, in_flight=gauges.in_flight)
        self._planner = Planner(self._meter, limits, cache)
        self._agrees = agree and gauges.world_size > 1
        self._told, self._asked, self._next = None, None, 0

    # -- what a user may look at -----------------------------------------------------------------

    @property
    def interval(self) -> Interval | None:
        """Steps between saves at present, and what they are set by; None while that is being found out."""
        return self._told if self._planner is None or self._agrees else self._planner.interval

    @property
    def overhead(self) -> float | None:
        """Share of training time that recent saves have added, as measured on this rank; None before."""
        costs = () if self._meter is None else self._meter.ledger.costs()
        return median(costs) / self.interval.steps if costs and self.interval else None

    @property
    def profile(self) -> Profile | None:
        """What was measured on this rank; None before the cost of a save is known."""
        return None if self._meter is None else self._meter.profile

    # -- Policy ----------------------------------------------------------------------------------

    def _is_regular(self) -> bool:
        return False

    def due(self, step: int) -> bool:
        """Whether a save comes now; times the iterations since the last question.

        Raises:
            ConfigError: `watch` was not called.
            CoordinationTimeout, CommitError: with several ranks, the first one did not say.
        """
        if step == self._asked:
            return step >= self._next
        if self._meter is None or self._planner is None:
            raise ConfigError(
                "Auto sees no engine: call policy.watch(checkpointer) before the first step"
            )
        if self._asked is None or step < self._asked:
            self._begin(step)
        self._asked = step
        self._meter.tick(step, self._clock())
        if step >= self._next:
            self._next = self._look(step)
        return step >= self._next

    def saved(self, step: int) -> None:
        assert self._planner is not None, "saved() follows due()"
        self._planner.saved(step)
        if not self._agrees:
            self._next = self._planner.after(step)
        elif self.interval is not None:
            self._next = next_look(self.interval, saved_at=step, now=step)
        else:
            self._next = step + 1

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """The first question, or training has gone back to an earlier step."""
        assert self._meter is not None and self._planner is not None
        if self._asked is not None:
            self._meter.go_back()
            self._planner.go_back()
        self._next = step if self.interval is None else step + self.interval.steps

    def _look(self, step: int) -> int:
        assert self._meter is not None and self._planner is not None
        if not self._agrees:
            return self._planner.plan(step)
        mine, gauges = None, self._meter.gauges
        if gauges.rank == 0:
            coming, found = self._planner.plan(step), self._planner.interval
            interval = None if found is None else [found.steps, found.reason.value]
            mine = [coming, interval, self._planner.preferred]
        coming, interval, mode = gauges.of_first_rank("policy", mine)
        self._told = None if interval is None else Interval(interval[0], Reason(interval[1]))
        if gauges.rank and mode not in (None, gauges.mode):
            gauges.prefer(mode)
        return int(coming)


def _checked_share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"max_overhead={value!r} must be above 0 and at most 1, such as 0.05")
    return float(value)
