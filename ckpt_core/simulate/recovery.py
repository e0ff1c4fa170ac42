"""What the papers say in closed form: recovery times, PCcheck's runtime, Daly's total time."""

from __future__ import annotations

import math

from ckpt_core.simulate.costs import Costs


def bound_s(costs: Costs, *, iteration_s: float, interval: int, persist_s: float) -> float:
    """Most time that a recovery takes: load, and the iterations that are done again.

    Args:
        costs: of the strategy; without anything behind training a failure loses one interval.
        iteration_s: of one iteration.
        interval: iterations between checkpoints.
        persist_s: T_w, from the start of a checkpoint to its commit, at worst.

    Source: PCcheck (ASPLOS '25) equation 4; for one in flight min(f, T_w / t) is at most f, so the
    bound is never above the 2 f t that the paper gives for CheckFreq and Gemini.
    """
    work_s = interval * iteration_s
    behind_s = min(costs.in_flight * work_s, persist_s)
    return costs.load_s + work_s + behind_s


def mean_s(costs: Costs, *, iteration_s: float, interval: int, persist_s: float) -> float:
    """Half of what `bound_s` gives for the iterations done again, and the load.

    Source: how PCcheck's published script for figure 9 turns equation 4 into an average.
    """
    bound = bound_s(costs, iteration_s=iteration_s, interval=interval, persist_s=persist_s)
    return costs.load_s + (bound - costs.load_s) / 2


def young_s(mtbf_s: float, *, cost_s: float) -> float:
    """Time between checkpoints that loses least when each costs `cost_s` (Young 1974)."""
    return math.sqrt(2 * mtbf_s * cost_s)


def daly_s(
    work_s: float, *, every_s: float, cost_s: float, recover_s: float, mtbf_s: float
) -> float:
    """Expected time for `work_s` of training with exponential failures, also while recovering.

    Args:
        work_s: training without checkpoints and failures.
        every_s: training between two checkpoints.
        cost_s: that training stands still for each.
        recover_s: restart and load.
        mtbf_s: mean time between failures.

    Source: Daly 2006, equation 20 there; exact when `every_s` divides `work_s`.
    """
    once_s = mtbf_s * math.exp(recover_s / mtbf_s) * math.expm1((every_s + cost_s) / mtbf_s)
    return once_s * work_s / every_s
