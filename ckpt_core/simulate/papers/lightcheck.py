"""Tables II and III and figure 9 of LightCheck, with the paper's numbers and two assumed ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache

from ckpt_core.simulate.costs import Costs
from ckpt_core.simulate.failures import Trace, exponential
from ckpt_core.simulate.papers.comparison import Comparison
from ckpt_core.simulate.papers.lightcheck_data import (
    BOUND,
    DISK,
    JOBS,
    LIGHTCHECK_OVERHEAD,
    MACHINES,
    MODELS,
    MTBF_S,
    PM_WRITE,
    RESTART_S,
    ROUND_S,
    TABLE_3_H,
    Model,
)
from ckpt_core.simulate.run import Goal, simulate
from ckpt_core.simulate.schedule import Load, mean_completion_s
from ckpt_core.simulate.strategies import Strategy

_STRATEGIES = (Strategy.LIGHTCHECK, Strategy.CHECKFREQ, Strategy.TORCH_SAVE)
_SEEDS = range(20)
_LOADS = range(40)
_HOUR_S = 3600.0
_SLOWER_MTBF_H = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def iteration_s(model: Model) -> float:
    """Seconds of an iteration. Table I says it: `torch.save` at its interval costs the 5 %."""
    return model.state_bytes / DISK / (BOUND * model.every[2])


def costs(model: Model, strategy: Strategy) -> Costs:
    """What a checkpoint costs at the interval of table I."""
    work_s = model.every[_STRATEGIES.index(strategy)] * iteration_s(model)
    disk_s, memory_s = model.state_bytes / DISK, model.state_bytes / PM_WRITE
    if strategy is Strategy.LIGHTCHECK:
        return Costs(stall_s=LIGHTCHECK_OVERHEAD * work_s, load_s=memory_s)
    if strategy is Strategy.CHECKFREQ:
        return Costs(stall_s=BOUND * work_s, persist_s=disk_s, load_s=disk_s)
    return Costs(stall_s=disk_s, load_s=disk_s)


def total_h(model: Model, strategy: Strategy, *, mtbf_s: float) -> float:
    """Hours that training takes with failures, the mean of 20 seeds."""
    step_s = iteration_s(model)
    goal = Goal(iterations=round(model.plain_h * _HOUR_S / step_s))
    return statistics.mean(
        simulate(
            costs(model, strategy),
            exponential(mtbf_s, seed=seed),
            goal,
            iteration_s=step_s,
            interval=model.every[_STRATEGIES.index(strategy)],
            restart_s=RESTART_S,
        ).wall_s
        / _HOUR_S
        for seed in _SEEDS
    )


def table_2(_trace: Trace | None) -> Iterator[Comparison]:
    """Total training time of six models with a failure each hour."""
    for model in MODELS:
        for strategy, hours in zip(_STRATEGIES, model.hours, strict=True):
            yield Comparison(
                what=f"{model.name}, {strategy}: hours",
                source="table II",
                paper=hours,
                ours=total_h(model, strategy, mtbf_s=MTBF_S),
                note=f"{iteration_s(model):.3f} s an iteration",
            )


def figure_9(_trace: Trace | None) -> Iterator[Comparison]:
    """Total training time of BERT against the mean time between failures."""
    bert = MODELS[-1]
    for hours in _SLOWER_MTBF_H:
        for strategy, paper in zip(_STRATEGIES, bert.hours, strict=True):
            yield Comparison(
                what=f"BERT, MTBF {hours:g} h, {strategy}: hours",
                source="figure 9" if hours * _HOUR_S != MTBF_S else "table II",
                paper=paper if hours * _HOUR_S == MTBF_S else None,
                ours=total_h(bert, strategy, mtbf_s=hours * _HOUR_S),
            )


def _switches(strategy: Strategy) -> tuple[tuple[float, float], ...]:
    rate = PM_WRITE if strategy is Strategy.LIGHTCHECK else DISK
    return tuple((m.state_bytes / rate, m.state_bytes / rate + RESTART_S) for m in MODELS)


def _jct_h(strategy: Strategy, mean_service_s: float, mean_gap_s: float) -> float:
    load = Load(
        tasks=JOBS,
        mean_service_s=mean_service_s,
        mean_gap_s=mean_gap_s,
        switches=_switches(strategy),
    )
    return mean_completion_s(load, machines=MACHINES, round_s=ROUND_S, seeds=_LOADS) / _HOUR_S


@cache
def _workload() -> tuple[float, float]:
    """Mean training and mean gap between arrivals that give LightCheck's two completion times."""
    light = Strategy.LIGHTCHECK
    static, continuous = (TABLE_3_H[kind, light] for kind in ("static", "continuous"))
    service_s = _solve(lambda x: _jct_h(light, x, 0.0) - static, 60.0, 20_000.0)
    gap_s = _solve(lambda x: continuous - _jct_h(light, service_s, x), 1.0, 5_000.0)
    return service_s, gap_s


def table_3(_trace: Trace | None) -> Iterator[Comparison]:
    """Average job completion time under preemption in rounds."""
    service_s, gap_s = _workload()
    for kind, gap in (("static", 0.0), ("continuous", gap_s)):
        found = {s: _jct_h(s, service_s, gap) for s in (Strategy.LIGHTCHECK, Strategy.TORCH_SAVE)}
        for strategy, value in found.items():
            yield Comparison(
                what=f"{kind}, {strategy}: average completion, hours",
                source="table III, simulation",
                paper=TABLE_3_H[kind, strategy],
                ours=value,
                note="sets the workload" if strategy is Strategy.LIGHTCHECK else "predicted",
            )
        light = Strategy.LIGHTCHECK
        yield Comparison(
            what=f"{kind}: torch.save / LightCheck",
            source="table III, simulation",
            paper=TABLE_3_H[kind, "torch.save"] / TABLE_3_H[kind, light],
            ours=found[Strategy.TORCH_SAVE] / found[light],
        )


def _solve(missing: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses zero, by halving."""
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if missing(middle) < 0 else (low, middle)
    return (low + high) / 2
