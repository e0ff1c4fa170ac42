"""From what was measured to the next step to save.

    SETTLING  -> MEASURING   -> PROBING                           -> RUNNING
    3 steps      5 iterations   a save that warms up, then one       after each save: what has it cost?
                 without saves  for each mode there is a choice of   The next comes when that is amortised.

A cached profile leads from MEASURING to RUNNING at once, and back to PROBING if it turns out not to fit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from statistics import median

from ckpt_core.policy.interval import Costs, Interval, Limits, choose_interval
from ckpt_core.policy.ledger import IDLE_AFTER, Base
from ckpt_core.policy.meter import Meter
from ckpt_core.policy.profile import Profile, ProfileCache

_log = logging.getLogger("ckpt_core")

SETTLING_STEPS = 3
MEASURED_STEPS = 5
_LOOK_AGAIN = 2
_MOST_GROWTH = 16
"""By how much one cycle alone may lengthen the interval that it began with, however often it is looked at: an
odd measurement must not leave a run unsaved. With less, a load that makes saves much dearer is met later."""
_FIRST_LOOK = 16
"""Steps after a save at which its interval is looked at again while it runs; then after twice as many."""
_KEEP_WITHIN = 1.1
_MARGIN = 1.0
"""Standard errors by which the cost of saves is taken to be above its mean: the bound is one from above."""
_CYCLES_WITHOUT_IDLE = 8
_CYCLES_WITHOUT_IDLE_AT_ONCE = 4
"""Where every iteration is saved, a base that is out of date costs most, and waiting for a new one least."""


class Phase(Enum):
    """What the planner is about."""

    SETTLING = auto()
    MEASURING = auto()
    PROBING = auto()
    RUNNING = auto()


def next_look(interval: Interval, *, saved_at: int, now: int) -> int:
    """The step at which an interval ends, or is looked at before that."""
    look = max(_FIRST_LOOK, 1 << (now - saved_at).bit_length())
    return max(saved_at + min(interval.steps, look), now)


class Planner:
    """Asked by `plan` at the steps that it has named itself; told of every save by `saved`.

    Args:
        meter: what is measured.
        limits: what the user allows.
        cache: of profiles; None keeps none.

    Attributes:
        preferred: the way of staging that is tried or chosen; None where there is no choice.
    """

    def __init__(self, meter: Meter, limits: Limits, cache: ProfileCache | None) -> None:
        self.phase = Phase.SETTLING
        self.interval: Interval | None = None
        self.preferred: str | None = None
        self._meter = meter
        self._ledger = meter.ledger
        self._limits = limits
        self._cache = cache
        self._start: Profile | None = None
        self._began: int | None = None
        self._saved_at: int | None = None
        self._held: int | None = None
        self._choices: Sequence[str] = ()
        self._untried: list[str] = []
        self._tried: dict[str, float] = {}
        self._cost_s = 0.0
        self._warm = False
        self._wished = False
        self._cycles_without_idle = 0

    def plan(self, step: int) -> int:
        """The next step with something to do; `step` itself: save now."""
        if self._began is None:
            self._began = step
        if self.phase is Phase.SETTLING:
            self.phase = Phase.MEASURING
            return step + SETTLING_STEPS + MEASURED_STEPS
        if self.phase is Phase.MEASURING:
            return self._measure(step)
        if self.phase is Phase.PROBING:
            # Another policy may have to agree first: until then there is nothing to measure.
            coming = step if self._wished else self._probe(step)
            self._wished = coming == step
            return coming
        return self._run(step)

    def saved(self, step: int) -> None:
        """A save of this step starts."""
        if self.phase is Phase.PROBING and not self._warm:
            self._ledger.drop_cycle()
        if self._ledger.idle_in_row:
            self._cycles_without_idle = 0
        else:
            self._cycles_without_idle += 1
        self._ledger.begin_cycle()
        self._saved_at, self._wished = step, False
        self._held = None if self.interval is None else self.interval.steps

    def go_back(self) -> None:
        """Training went back to an earlier step."""
        self._began = self._saved_at = None

    def after(self, step: int) -> int:
        """The next step with something to do, once `step` is being saved."""
        if self.phase is Phase.RUNNING and self.interval is not None:
            return next_look(self.interval, saved_at=step, now=step)
        return self._wait(step, _LOOK_AGAIN)

    # -- phases ----------------------------------------------------------------------------------

    def _measure(self, step: int) -> int:
        if self._ledger.idle_in_row < MEASURED_STEPS:
            return self._wait(step, MEASURED_STEPS - self._ledger.idle_in_row)
        self._start = None if self._cache is None else self._cache.read()
        if self._start is None:
            self.phase = Phase.PROBING
            return step
        self.phase = Phase.RUNNING
        self._prefer(self._start.mode, self._meter.gauges.modes(self._start.state_bytes))
        self._meter.activity.seed(self._start.persist_s)
        self._ledger.restart(self._start.save_s / self._start.iteration_s)
        self._choose()
        return step

    def _probe(self, step: int) -> int:
        """After a save: once its cost is known, save again in the next mode, or begin to run."""
        if self._saved_at is None:
            return step
        activity, later = self._meter.activity, self._wait(step, _LOOK_AGAIN)
        is_over = not activity.under_way and self._ledger.idle_in_row >= IDLE_AFTER
        # A save that may not wait any longer ends what is measured. The first one has to be whole for that.
        if not is_over and (later > step or not activity.state_bytes):
            return later
        gauges = self._meter.gauges
        if not self._warm:
            self._warm = True
            # Allocations of the first save are paid once.
            self._ledger.drop_cycle()
            self._choices = gauges.modes(self._meter.activity.state_bytes)
            self._untried = [*self._choices] or [gauges.mode]
        elif self._ledger.cycle() is not None:
            self._tried[gauges.mode] = self._ledger.costs()[-1]
        if self._untried:
            self._prefer(self._untried.pop(0), self._choices)
            return step
        if not self._tried:
            return step
        best = min(self._tried, key=lambda mode: self._tried[mode])
        self._prefer(best, self._choices)
        self._ledger.restart(self._tried[best])
        self.phase = Phase.RUNNING
        return self._end_interval(step)

    def _run(self, step: int) -> int:
        if not self._start_fits():
            self.phase, self._saved_at = Phase.PROBING, None
            self._ledger.restart()
            return step
        assert self.interval is not None
        if self._saved_at is None or step >= self._saved_at + self.interval.steps:
            return self._end_interval(step)
        self._shorten()
        return next_look(self.interval, saved_at=self._saved_at, now=step)

    def _end_interval(self, step: int) -> int:
        self._choose()
        assert self.interval is not None
        if self._saved_at is None:
            return step
        if self._saved_at + self.interval.steps <= step and self._needs_idle():
            return self._wait(step, _LOOK_AGAIN)
        return next_look(self.interval, saved_at=self._saved_at, now=step)

    # -- inside ----------------------------------------------------------------------------------

    def _prefer(self, mode: str, choices: Sequence[str]) -> None:
        self._meter.gauges.prefer(mode)
        # Without a choice each rank has its own way, as its root asks for.
        self.preferred = mode if choices else None

    def _choose(self) -> None:
        """Set the interval from what recent saves have cost."""
        base, costs = self._ledger.base(), self._ledger.costs(margin=_MARGIN)
        if not costs or base is None:
            return
        # One cycle alone may be odd; when it is not, the next one says so too.
        usual = self._interval_for(max(median(costs), min(costs[-2:])), base)
        chosen = self._interval_for(max(costs[-2:]), base)
        before, self._cost_s = self.interval, max(costs[-2:]) * base.seconds
        if before is not None:
            held = self._held or before.steps
            grows = self._interval_for(costs[-1], base).steps > held
            most = max(usual.steps, held * _MOST_GROWTH if grows else held)
            chosen = replace(chosen, steps=min(chosen.steps, most))
            if chosen.steps <= before.steps <= chosen.steps * _KEEP_WITHIN:
                return
        if before is None or chosen.steps != before.steps:
            self._set(chosen)

    def _shorten(self) -> None:
        """Look at an interval while it runs: where iterations are much slower by now, it lasts too long.

        What made them slower may make saves dearer too: the next one shows that.
        """
        base = self._ledger.base()
        if base is None or self._ledger.idle_in_row < IDLE_AFTER:
            return
        found = self._interval_for(self._cost_s / base.seconds, base)
        # Not for less: what only differs by noise would have intervals end early, and none late.
        if self.interval is not None and found.steps <= self.interval.steps / 2:
            self._ledger.restart(self._cost_s / base.seconds)
            self._set(found)

    def _set(self, chosen: Interval) -> None:
        _log.info("saving every %d steps (%s)", chosen.steps, chosen.reason)
        self.interval = chosen
        self._keep()

    def _interval_for(self, cost: float, base: Base) -> Interval:
        persist_s = self._meter.activity.persist_s
        return choose_interval(Costs(base.seconds, cost * base.seconds, persist_s), self._limits)

    def _wait(self, step: int, steps: int) -> int:
        """The next look, after so many steps; `step` itself where the save may not wait for any."""
        most, latest = self._limits.max_steps, sys.maxsize
        if most is not None and self._saved_at is not None:
            latest = self._saved_at + most
        elif most is not None and self._began is not None:
            latest = self._began + max(most, SETTLING_STEPS + MEASURED_STEPS)
        return max(min(step + steps, latest), step)

    def _needs_idle(self) -> bool:
        """Whether the base has not been measured for so long that a save must wait for it."""
        at_once = self.interval is not None and self.interval.steps == 1
        if self._cycles_without_idle < (
            _CYCLES_WITHOUT_IDLE_AT_ONCE if at_once else _CYCLES_WITHOUT_IDLE
        ):
            return False
        return self._ledger.idle_in_row < IDLE_AFTER

    def _start_fits(self) -> bool:
        """Whether a cached profile is of this run; asked once, when the first save has shown that."""
        if self._start is None or (found := self._meter.profile) is None:
            return True
        fits = found.fits(self._start)
        self._start = None
        if not fits:
            _log.info("the cached profile does not fit this run: measuring anew")
        return fits

    def _keep(self) -> None:
        profile = self._meter.profile
        if self._cache is not None and profile is not None and self._meter.gauges.rank == 0:
            self._cache.write(profile)
