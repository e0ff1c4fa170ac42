"""How PCcheck turns throughput, a number of rollbacks and equation 4 into goodput (section 5.2.3).

No events: every rollback costs the same average time, and that time is taken off the run. It prices an
iteration that is done again at its time without checkpoints, and divides what remains by its time with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.simulate.costs import Costs
from ckpt_core.simulate.recovery import mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A strategy in that accounting.

    Attributes:
        per_s: iterations per second with checkpoints, without failures.
        plain_s: seconds of an iteration without checkpoints.
        redo_s: average cost of a rollback.
        rollbacks: in the run.
        duration_s: of the run.
    """

    per_s: float
    plain_s: float
    redo_s: float
    rollbacks: int
    duration_s: float

    @property
    def total(self) -> float:
        """Iterations without failures."""
        return self.duration_s * self.per_s

    @property
    def redone(self) -> float:
        """Iterations that could have been done in the time of the rollbacks."""
        return self.rollbacks * self.redo_s * self.per_s

    @property
    def goodput(self) -> float:
        """Iterations per second that remain."""
        return max(0.0, self.total - self.redone) / self.duration_s


def redo_s(
    costs: Costs, *, iteration_s: float, interval: int, persist_s: float, one: bool
) -> float:
    """Average cost of a rollback: load, and half of equation 4.

    Args:
        costs: of the strategy.
        iteration_s: of an iteration without checkpoints.
        interval: iterations between checkpoints.
        persist_s: T_w.
        one: one checkpoint at a time behind training (CheckFreq, Gemini): half of 2 f t, always.
    """
    if one:
        return costs.load_s + interval * iteration_s
    return mean_s(costs, iteration_s=iteration_s, interval=interval, persist_s=persist_s)
