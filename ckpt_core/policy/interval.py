"""How many steps lie between saves, from numbers that were measured. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """What an interval is set by: the largest of these wins."""

    OVERHEAD = "overhead"
    PERSIST = "persist"
    MTBF = "mtbf"
    AT_LEAST = "min_steps"
    AT_MOST = "max_steps"


@dataclass(frozen=True, slots=True)
class Costs:
    """What saves cost, in seconds.

    Attributes:
        iteration_s: one iteration without checkpoint activity (CheckFreq: Ti).
        save_s: what one save adds to training, stall and slowdown together.
        persist_s: from the begin of a save to its commit (PCcheck: Tw).
    """

    iteration_s: float
    save_s: float
    persist_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows.

    Attributes:
        max_overhead: share of the time without checkpoints that saves may add.
        in_flight: checkpoints that may be under way at once (PCcheck: N).
        mtbf_s: mean time between failures of the whole job; None: nothing is known.
        min_steps, max_steps: bounds of the interval; `max_steps` wins over all else.
    """

    max_overhead: float = 0.05
    in_flight: int = 1
    mtbf_s: float | None = None
    min_steps: int = 1
    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps between saves, and what they are set by."""

    steps: int
    reason: Reason


def choose_interval(costs: Costs, limits: Limits) -> Interval:
    """The smallest interval that keeps within the limits, or the Young-Daly optimum if that is longer.

    Source: CheckFreq (FAST '21) section 4.2 (amortise the cost within the bound), PCcheck (ASPLOS '25)
    section 3.4 (persists do not pile up), Daly (FGCS 2006).
    """
    wanted = {
        Reason.OVERHEAD: _steps(costs.save_s / limits.max_overhead, costs.iteration_s),
        Reason.PERSIST: pile_up_steps(costs, limits),
        Reason.AT_LEAST: limits.min_steps,
    }
    if limits.mtbf_s is not None:
        optimum = daly_interval_s(costs.save_s, limits.mtbf_s)
        wanted[Reason.MTBF] = _steps(optimum, costs.iteration_s)
    reason = max(wanted, key=lambda key: wanted[key])
    if limits.max_steps is not None and wanted[reason] > limits.max_steps:
        return Interval(limits.max_steps, Reason.AT_MOST)
    return Interval(wanted[reason], reason)


def pile_up_steps(costs: Costs, limits: Limits) -> int:
    """The smallest interval at which saves end as fast as they are started: f* = ceil(Tw / (N q t)).

    Source: PCcheck (ASPLOS '25) section 3.4; q is the slowdown that is allowed.
    """
    slowed_s = limits.in_flight * (1 + limits.max_overhead) * costs.iteration_s
    return _steps(costs.persist_s, slowed_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds between saves that lose the least time to saves and failures together.

    Args:
        save_s: what one save adds to training.
        mtbf_s: mean time between failures of the job.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    FGCS 22 (2006), equation 37; its first term is Young's sqrt(2 save_s mtbf_s).
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    first = math.sqrt(2 * save_s * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def _steps(seconds: float, iteration_s: float) -> int:
    """Iterations that take at least so long; 1 or more."""
    if seconds <= 0 or iteration_s <= 0:
        return 1
    # Rounding errors must not cost a whole step.
    return max(math.ceil(seconds / iteration_s - 1e-9), 1)
