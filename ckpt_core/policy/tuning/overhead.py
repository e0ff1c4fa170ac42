"""From the figures of a candidate to the interval to save at, and what that interval costs. Pure.

PCcheck (ASPLOS '25) section 3.4; its q is the slowdown, 1.05 for `max_overhead` 0.05.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.policy import interval
from ckpt_core.policy.interval import Interval
from ckpt_core.policy.tuning.timing import Timing

_ALWAYS = 0.95
"""Part of the time in which storage is in use, above which training may have waited for it."""

_MOST_GROWTH = 8
_NEAR = 1.3
"""Intervals this near each other are not worth telling apart."""


@dataclass(frozen=True, slots=True)
class Load:
    """What saving costs beside one training run.

    Attributes:
        each_s: T_w / N: seconds that storage is busy for each checkpoint.
        iteration_s: t: one iteration without checkpoints.
        lost_s: training time lost for each save while storage keeps up; 0 if unknown.
    """

    each_s: float
    iteration_s: float
    lost_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.iteration_s > 0 and math.isfinite(self.iteration_s)):
            raise ConfigError(f"iteration_s={self.iteration_s!r} must be above zero, in seconds")

    def least_interval(self, max_overhead: float) -> Interval:
        """The larger of f* = ceil(T_w / (N q t)) and of what spreads the time lost for each save."""
        # T_w / N was measured as one number: so it stands for T_w, with one in flight.
        costs = interval.Costs(self.iteration_s, self.lost_s, self.each_s)
        return interval.choose_interval(costs, interval.Limits(max_overhead))

    def overhead_at(self, every: int) -> float:
        """Part of the training time that saving every `every` steps is expected to cost.

        Below f* training waits for storage; above it only what each save takes is lost.
        """
        waiting = self.each_s / (every * self.iteration_s) - 1
        return max(waiting, self.lost_s / (every * self.iteration_s), 0.0)


@dataclass(frozen=True, slots=True)
class Checked:
    """What an interval was measured to cost.

    Attributes:
        every: steps from save to save.
        overheads: one for each round: iterations with saves over those without, less 1.
    """

    every: int
    overheads: tuple[float, ...]

    @property
    def overhead(self) -> float:
        """The median."""
        return statistics.median(self.overheads)

    @property
    def spread(self) -> float:
        """Most less least."""
        return max(self.overheads) - min(self.overheads)


def typical_loss_s(timings: Sequence[Timing]) -> float:
    """Training time lost for each save, from the turns in which storage kept up; 0 if there was none."""
    losses = [t.lost_s for t in timings if t.used < _ALWAYS and t.iteration_s and t.clean_s]
    return statistics.median(losses) if losses else 0.0


def most_lost_s(timings: Sequence[Timing], *, between_s: float, in_flight: int) -> float:
    """Training that a crash takes at most: from save to save, and what was on its way, at its longest.

    Source: PCcheck (ASPLOS '25) equation 4, without the load.
    """
    longest_s = max(timing.longest_s for timing in timings)
    return between_s + min(in_flight * between_s, longest_s)


def next_interval(checks: Sequence[Checked], *, max_overhead: float) -> int | None:
    """Where to look next for the smallest interval that keeps the bound; None: it is found.

    Upwards by what each save lost, until one keeps it; then between that and the longest that did not.
    """
    kept = kept_interval(checks, max_overhead=max_overhead)
    failed = [checked for checked in checks if checked.overhead > max_overhead]
    if kept is None:
        longest = max(failed, key=lambda checked: checked.every)
        needed = math.ceil(longest.every * longest.overhead / max_overhead)
        return max(longest.every + 1, min(needed, longest.every * _MOST_GROWTH))
    below = max((c.every for c in failed if c.every < kept.every), default=kept.every)
    middle = math.isqrt(below * kept.every)
    return middle if below < middle < kept.every and kept.every > _NEAR * below else None


def kept_interval(checks: Sequence[Checked], *, max_overhead: float) -> Checked | None:
    """The smallest interval that kept the bound; None if none did."""
    kept = [checked for checked in checks if checked.overhead <= max_overhead]
    return min(kept, key=lambda checked: checked.every, default=None)


def nearest_overhead(checks: Sequence[Checked]) -> Checked:
    """Of intervals that all cost too much the one that came nearest."""
    return min(checks, key=lambda checked: checked.overhead)
