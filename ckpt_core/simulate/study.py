"""Many runs beside each other: strategies, intervals and failure rates."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpt_core.simulate.costs import Costs, FurtherLevel, Kind
from ckpt_core.simulate.failures import Outage, Stops, Trace, exponential, of_kinds, of_nodes
from ckpt_core.simulate.recovery import bound_s, young_s
from ckpt_core.simulate.run import Goal, Outcome, simulate
from ckpt_core.simulate.strategies import Setting, Strategy, costs_of
from ckpt_core.simulate.stretch import Stretch, stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What to run.

    Attributes:
        setting: job and machine.
        goal: of each run.
        strategies: beside each other, with the same failures.
        intervals: iterations between checkpoints.
        longer: while the longest of them is the best one of a strategy that meets failures, try twice that.
        mtbfs_s: mean times between failures of the job; empty: no failures, or those of `trace`.
        trace: instead of a mean time between failures.
        stops: which changes of the trace stop the job.
        gpus: that the job needs; with fewer it waits.
        restart_s: from a failure until loading begins.
        runs: with seeds from `seed` on; figures are their means. A trace is run once.
        stalls: seconds that training stands still for a checkpoint, beyond what the strategy costs.
        survives: the worst failure that the first root survives.
        levels: further levels, beside each other: each entry is one way to have them.
        kinds: how often failures are of each kind, as shares; empty: each is what a trace says, or a node.
        nodes: of which one is lost at a time, where a level needs to know; 0: none does.
    """

    setting: Setting
    goal: Goal
    strategies: tuple[Strategy, ...] = tuple(Strategy)
    intervals: tuple[int, ...] = (1, 10, 25, 50, 100)
    longer: bool = False
    mtbfs_s: tuple[float, ...] = ()
    trace: Trace | None = None
    stops: Stops = Stops.ANY
    gpus: int = 0
    restart_s: float = 0.0
    seed: int = 0
    runs: int = 1
    stalls: Mapping[Strategy, float] = field(default_factory=dict)
    survives: Kind = Kind.SITE
    levels: tuple[tuple[FurtherLevel, ...], ...] = ((),)
    kinds: Mapping[Kind, float] = field(default_factory=dict)
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One strategy, interval, failure rate and choice of levels; counts and times are means over runs.

    Attributes:
        every: iterations between the steps of each further level.
        slowdown: of training without failures, over training without checkpoints.
        goodput: iterations that count for each second, failures and recoveries included.
        wall_s, iterations, redone, failures, down_s, stalled_s: as of `Outcome`.
        mean_recovery_s: load, and doing the lost iterations again, over all failures.
        worst_recovery_s: the same, of the worst failure there was.
        bound_s: what the worst can be (PCcheck equation 4); None where levels can be lost.
        most_s: time that one failure can cost besides the restart, with what training waits for; likewise.
        young_interval: what Young's formula gives for the time that training stands still for a checkpoint
            when storage keeps up; None where that is nothing, or without an MTBF.
        events: checkpoints and outages that were simulated one by one, of all runs.
    """

    strategy: Strategy
    interval: int
    every: tuple[int, ...]
    mtbf_s: float | None
    slowdown: float
    goodput: float
    wall_s: float
    iterations: float
    redone: float
    failures: float
    down_s: float
    stalled_s: float
    mean_recovery_s: float | None
    worst_recovery_s: float | None
    bound_s: float | None
    most_s: float | None
    young_interval: int | None
    events: int


def run_study(study: Study) -> list[Point]:
    """Every combination, in the order of strategies, failure rates, intervals and levels.

    Raises:
        ConfigError: a number is out of range, or a run does not reach its goal.
    """
    return [
        point
        for strategy in study.strategies
        for mtbf_s in study.mtbfs_s or (None,)
        for point in _points(study, strategy, mtbf_s)
    ]


def _points(study: Study, strategy: Strategy, mtbf_s: float | None) -> list[Point]:
    costs = study_costs(study, strategy)
    points: list[Point] = []
    intervals = list(study.intervals)
    for interval in intervals:
        points += [
            _point(study, dataclasses.replace(costs, levels=levels), strategy, interval, mtbf_s)
            for levels in study.levels
        ]
        best = max(points, key=lambda point: point.goodput)
        # Without failures the best is never to save.
        if study.longer and interval == max(intervals) == best.interval and best.failures:
            intervals.append(2 * interval)
    return points


def _point(
    study: Study, costs: Costs, strategy: Strategy, interval: int, mtbf_s: float | None
) -> Point:
    iteration_s = study.setting.job.iteration_s
    course = stretch(costs, iteration_s=iteration_s, interval=interval)
    outcomes = [
        simulate(
            costs,
            outages,
            study.goal,
            iteration_s=iteration_s,
            interval=interval,
            restart_s=study.restart_s,
        )
        for outages in _failures(study, mtbf_s)
    ]
    failures = sum(one.failures for one in outcomes)
    is_bounded = costs.survives is Kind.SITE
    again_s = sum(one.loads_s + one.redone * iteration_s for one in outcomes)
    return Point(
        strategy=strategy,
        interval=interval,
        every=tuple(level.every for level in costs.levels),
        mtbf_s=mtbf_s,
        slowdown=course.slowdown,
        goodput=statistics.mean(one.goodput for one in outcomes),
        **_means(outcomes),
        mean_recovery_s=again_s / failures if failures else None,
        worst_recovery_s=max(one.worst_recovery_s for one in outcomes) if failures else None,
        bound_s=_bound_s(costs, course) if is_bounded else None,
        most_s=costs.load_s + course.worst_lost_s if is_bounded else None,
        young_interval=_young(costs, iteration_s, mtbf_s),
        events=sum(one.events for one in outcomes),
    )


def study_costs(study: Study, strategy: Strategy) -> Costs:
    """What a checkpoint of `strategy` costs in this study."""
    costs = costs_of(strategy, study.setting)
    more_s = study.stalls.get(strategy, 0.0)
    return dataclasses.replace(costs, stall_s=costs.stall_s + more_s, survives=study.survives)


def _means(outcomes: list[Outcome]) -> dict[str, float]:
    names = ("wall_s", "iterations", "redone", "failures", "down_s", "stalled_s")
    return {name: statistics.mean(getattr(one, name) for one in outcomes) for name in names}


def _failures(study: Study, mtbf_s: float | None) -> Iterator[Iterable[Outage]]:
    if study.trace is not None:
        yield _of_kinds(study, study.trace.outages(stops=study.stops, gpus=study.gpus), study.seed)
    elif mtbf_s is None:
        yield ()
    else:
        for seed in range(study.seed, study.seed + study.runs):
            yield _of_kinds(study, exponential(mtbf_s, seed=seed), seed)


def _of_kinds(study: Study, outages: Iterable[Outage], seed: int) -> Iterable[Outage]:
    if study.kinds:
        outages = of_kinds(outages, study.kinds, seed=seed)
    return of_nodes(outages, study.nodes, seed=seed) if study.nodes else outages


def _bound_s(costs: Costs, course: Stretch) -> float:
    return bound_s(
        costs,
        iteration_s=course.iteration_s,
        interval=course.interval,
        persist_s=course.persist_s,
    )


def _young(costs: Costs, iteration_s: float, mtbf_s: float | None) -> int | None:
    cost_s = costs.stall_s + costs.update_wait_s
    if mtbf_s is None or not cost_s:
        return None
    return max(1, round(young_s(mtbf_s, cost_s=cost_s) / iteration_s))
