"""A whole run: stretches of training between outages. Time passes from outage to outage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.simulate.costs import Costs, check
from ckpt_core.simulate.failures import Outage
from ckpt_core.simulate.levels import Holdings
from ckpt_core.simulate.stretch import Stretch, stretch

_END = Outage(float("inf"), float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How far a run goes: for so long, or until so many iterations are done; exactly one of them.

    Attributes:
        most_outages: after which a run is given up; no job lives through so many.
    """

    duration_s: float | None = None
    iterations: int | None = None
    most_outages: int = 1_000_000

    def __post_init__(self) -> None:
        """Raises ConfigError unless exactly one is given, and above zero."""
        if (self.duration_s is None) == (self.iterations is None):
            raise ConfigError("give either duration_s or iterations, and not both")
        check("duration_s", 1.0 if self.duration_s is None else self.duration_s, above=0.0)
        check("iterations", 1.0 if self.iterations is None else self.iterations, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run.

    Attributes:
        wall_s: from its start to its end.
        iterations: that count at the end.
        redone: that were done and lost.
        failures: outages that came before the end.
        down_s: recovering (restart and load), or waiting for GPUs.
        stalled_s: training waited for checkpoints, or was in an iteration that was cut off.
        worst_lost: most iterations that one failure took.
        loads_s: part of `down_s` that the state was loaded; of a recovery that was cut off, all of it.
        worst_recovery_s: longest time to load, and to do again what was lost at the failure before.
        events: checkpoints and outages that were simulated one by one.
    """

    wall_s: float
    iterations: int
    redone: int
    failures: int
    down_s: float
    stalled_s: float
    worst_lost: int
    loads_s: float
    worst_recovery_s: float
    events: int

    @property
    def goodput(self) -> float:
        """Iterations that count, for each second of the run."""
        return self.iterations / self.wall_s


@dataclass(slots=True)
class _Tally:
    kept: int = 0
    redone: int = 0
    failures: int = 0
    up_s: float = 0.0
    worst_lost: int = 0
    loads_s: float = 0.0
    worst_recovery_s: float = 0.0


def simulate(
    costs: Costs,
    outages: Iterable[Outage],
    goal: Goal,
    *,
    iteration_s: float,
    interval: int,
    restart_s: float = 0.0,
) -> Outcome:
    """Run a job through `outages`; after each it needs `restart_s` and the load before it trains.

    An outage that comes during a recovery begins the recovery anew. A run of a given duration counts
    at its end what is done; so much of it may still be lost.

    Raises:
        ConfigError: a number is out of range, or the goal is not reached after `most_outages`.
    """
    check("restart_s", restart_s)
    course = stretch(costs, iteration_s=iteration_s, interval=interval)
    tally = _Tally()
    holdings = Holdings(costs, course)
    end_s = _go(holdings, course, outages, goal, restart_s=restart_s, tally=tally)
    return Outcome(
        wall_s=end_s,
        iterations=tally.kept,
        redone=tally.redone,
        failures=tally.failures,
        down_s=max(0.0, end_s - tally.up_s),
        stalled_s=max(0.0, tally.up_s - (tally.kept + tally.redone) * iteration_s),
        worst_lost=tally.worst_lost,
        loads_s=tally.loads_s,
        worst_recovery_s=tally.worst_recovery_s,
        events=course.events + tally.failures,
    )


def _go(
    holdings: Holdings,
    course: Stretch,
    outages: Iterable[Outage],
    goal: Goal,
    *,
    restart_s: float,
    tally: _Tally,
) -> float:
    """Fill `tally`; the time at which the run ends."""
    ready_s = 0.0
    for outage in itertools.chain(outages, itertools.repeat(_END)):
        stop_s = min(outage.at_s, goal.duration_s or _END.at_s)
        if goal.iterations is not None:
            end_s = ready_s + course.time_of(goal.iterations - tally.kept)
            if end_s <= stop_s < _END.at_s or (stop_s == _END.at_s > ready_s):
                tally.kept, tally.up_s = goal.iterations, tally.up_s + end_s - ready_s
                return end_s
        if goal.duration_s == stop_s or stop_s == _END.at_s:
            break
        load_s = _fail(holdings, course, outage, up_s=stop_s - ready_s, tally=tally)
        ready_s = max(ready_s, outage.back_s + restart_s + load_s)
        if tally.failures >= goal.most_outages:
            raise _out_of_reach(tally)
    if goal.duration_s is None:
        raise _out_of_reach(tally)
    up_s = max(0.0, goal.duration_s - ready_s)
    tally.kept, tally.up_s = tally.kept + course.iterations_at(up_s), tally.up_s + up_s
    return goal.duration_s


def _out_of_reach(tally: _Tally) -> ConfigError:
    return ConfigError(
        f"the goal is out of reach: {tally.kept} iterations were kept after {tally.failures} failures; "
        "save more often, or let failures be rarer"
    )


def _fail(
    holdings: Holdings, course: Stretch, outage: Outage, *, up_s: float, tally: _Tally
) -> float:
    """A failure `up_s` after training began; at or below 0 when it was not yet on its way again.

    Returns:
        How long the state takes to load.
    """
    done = tally.kept + (course.iterations_at(up_s) if up_s > 0 else 0)
    left, load_s = holdings.fail(outage.kind, tally.kept, up_s, at_s=outage.at_s, node=outage.node)
    lost, tally.kept = done - left, left
    tally.failures += 1
    tally.redone += lost
    tally.up_s += max(0.0, up_s)
    tally.loads_s += load_s
    tally.worst_lost = max(tally.worst_lost, lost)
    again_s = load_s + lost * course.iteration_s
    tally.worst_recovery_s = max(tally.worst_recovery_s, again_s)
    return load_s
