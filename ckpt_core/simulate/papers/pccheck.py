"""Section 5.2.3's worked example, figures 8 and 9 and equation 4 of PCcheck, with the paper's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ckpt_core.simulate.costs import Costs, Job, Rates, Sharing
from ckpt_core.simulate.failures import Trace
from ckpt_core.simulate.papers.accounting import Account, redo_s
from ckpt_core.simulate.papers.comparison import Comparison
from ckpt_core.simulate.papers.pccheck_data import (
    IN_FLIGHT,
    LINK,
    NETWORK,
    OPT_1_3B,
    OPT_2_7B_BYTES,
    OPT_2_7B_GEMINI,
    OPT_2_7B_ITERATION_S,
    ROLLBACKS,
    TRACE_S,
    VGG16_GOODPUT,
    VGG16_INTERVALS,
    VGG16_LOAD_S,
    VGG16_PLAIN,
    VGG16_THROUGHPUT,
)
from ckpt_core.simulate.recovery import bound_s
from ckpt_core.simulate.run import Goal, Outcome, simulate
from ckpt_core.simulate.strategies import Setting, Strategy, costs_of
from ckpt_core.simulate.stretch import stretch

_EXAMPLE = "section 5.2.3"
_EVENTS = "event by event, on the trace"


def opt_iteration_s() -> float:
    """Seconds of an iteration of OPT-1.3B without checkpoints.

    The text does not say. Its accounting says: CheckFreq loses 257 of 3404 iterations to 51 rollbacks
    that take f t + l each; f = 10 and l = 12.6 s leave t. PCcheck's 550 is then a prediction.
    """
    opt = OPT_1_3B
    redo = opt.checkfreq_redone / opt.checkfreq_total * TRACE_S / ROLLBACKS
    return (redo - opt.load_s) / opt.interval


def opt_setting() -> Setting:
    """OPT-1.3B on the paper's machine."""
    opt = OPT_1_3B
    rates = Rates(
        write=opt.state_bytes * opt.faster / opt.serial_s,
        serial=opt.state_bytes / opt.serial_s,
        copy=LINK,
        read=opt.state_bytes / opt.load_s,
        network=NETWORK,
    )
    job = Job(iteration_s=opt_iteration_s(), state_bytes=opt.state_bytes)
    return Setting(job, rates, IN_FLIGHT["opt-1.3b"])


def fitted(costs: Costs, *, iteration_s: float, interval: int, per_s: float) -> Costs:
    """`costs` with what it takes to train at `per_s` iterations per second at this interval.

    Where training waits for storage, persisting takes as much longer or shorter. Where it does not, it
    stands still for the difference.
    """
    course = stretch(costs, iteration_s=iteration_s, interval=interval)
    period_s = interval / course.iterations_per_s
    more_s = interval / per_s - period_s
    free_s = interval * iteration_s + costs.update_wait_s + costs.stall_s
    if more_s < 0 or period_s > free_s * (1 + 1e-9):
        return dataclasses.replace(costs, persist_s=max(0.0, costs.persist_s + more_s))
    return dataclasses.replace(costs, stall_s=costs.stall_s + more_s)


def example(trace: Trace | None) -> Iterator[Comparison]:
    """6137 and 550 iterations of PCcheck, 3404 and 257 of CheckFreq."""
    opt, at, t = OPT_1_3B, opt_setting(), opt_iteration_s()
    implied = opt.pccheck_total / TRACE_S
    rows = {}
    for strategy, per_s in ((Strategy.PCCHECK, implied), (Strategy.CHECKFREQ, opt.checkfreq_per_s)):
        costs = costs_of(strategy, at)
        costs = fitted(costs, iteration_s=t, interval=opt.interval, per_s=per_s)
        course = stretch(costs, iteration_s=t, interval=opt.interval)
        redo = redo_s(
            costs,
            iteration_s=t,
            interval=opt.interval,
            persist_s=course.persist_s,
            one=strategy is Strategy.CHECKFREQ,
        )
        rows[strategy] = Account(
            per_s=per_s, plain_s=t, redo_s=redo, rollbacks=ROLLBACKS, duration_s=TRACE_S
        )
    ours, other = rows[Strategy.PCCHECK], rows[Strategy.CHECKFREQ]
    printed = opt.pccheck_per_s * TRACE_S
    yield from _example_rows(ours, other, printed)
    if trace is not None:
        yield from _example_events(trace)


def _example_rows(ours: Account, other: Account, printed: float) -> Iterator[Comparison]:
    opt = OPT_1_3B
    implied = f"throughput {ours.per_s:.4f} /s, which the paper prints as 0.5"
    yield _row(
        "PCcheck, iterations without failures", opt.pccheck_total, printed, "0.5 /s as printed"
    )
    yield _row("PCcheck, iterations without failures", opt.pccheck_total, ours.total, implied)
    yield _row("CheckFreq, iterations without failures", opt.checkfreq_total, other.total)
    yield _row("PCcheck, iterations redone", opt.pccheck_redone, ours.redone, "predicted")
    yield _row(
        "CheckFreq, iterations redone",
        opt.checkfreq_redone,
        other.redone,
        f"gives the iteration time, {other.plain_s:.3f} s",
    )
    yield _row("goodput, PCcheck / CheckFreq", opt.goodput_ratio, ours.goodput / other.goodput)


def _row(what: str, paper: float, ours: float, note: str = "") -> Comparison:
    return Comparison(what=what, source=_EXAMPLE, paper=paper, ours=ours, note=note)


def _example_events(trace: Trace) -> Iterator[Comparison]:
    opt, at, t = OPT_1_3B, opt_setting(), opt_iteration_s()
    found: dict[Strategy, Outcome] = {}
    for strategy, per_s in (
        (Strategy.PCCHECK, opt.pccheck_total / TRACE_S),
        (Strategy.CHECKFREQ, opt.checkfreq_total / TRACE_S),
    ):
        costs = fitted(costs_of(strategy, at), iteration_s=t, interval=opt.interval, per_s=per_s)
        found[strategy] = _replay(costs, trace, iteration_s=t, interval=opt.interval)
    ours, other = found[Strategy.PCCHECK], found[Strategy.CHECKFREQ]
    yield _row("PCcheck, iterations redone", opt.pccheck_redone, ours.redone, _EVENTS)
    yield _row("CheckFreq, iterations redone", opt.checkfreq_redone, other.redone, _EVENTS)
    yield _row(
        "goodput, PCcheck / CheckFreq", opt.goodput_ratio, ours.goodput / other.goodput, _EVENTS
    )


def _replay(costs: Costs, trace: Trace, *, iteration_s: float, interval: int) -> Outcome:
    return simulate(
        costs,
        trace.outages(),
        Goal(duration_s=trace.duration_s),
        iteration_s=iteration_s,
        interval=interval,
    )


def vgg_costs(strategy: Strategy, interval: int, per_s: float) -> Costs:
    """What explains the measured throughput of VGG16 at this interval.

    Storage time is the period at an interval of 10, where training waits for storage all the time.
    """
    if strategy is Strategy.IDEAL:
        return Costs(load_s=VGG16_LOAD_S)
    plain_s = 1 / VGG16_PLAIN[strategy]
    busy_s = VGG16_INTERVALS[0] / VGG16_THROUGHPUT[strategy][0]
    costs = {
        Strategy.CHECKFREQ: Costs(persist_s=busy_s, load_s=VGG16_LOAD_S),
        Strategy.GPM: Costs(load_s=VGG16_LOAD_S),
        Strategy.PCCHECK: Costs(
            persist_s=busy_s,
            in_flight=IN_FLIGHT["vgg16"],
            sharing=Sharing.EQUAL,
            load_s=VGG16_LOAD_S,
        ),
    }[strategy]
    return fitted(costs, iteration_s=plain_s, interval=interval, per_s=per_s)


def figure_9(trace: Trace | None) -> Iterator[Comparison]:
    """Goodput of VGG16, and PCcheck's over the others', from the throughput of figure 8."""
    for k, interval in enumerate(VGG16_INTERVALS):
        ours = {name: _vgg_goodput(name, k, trace) for name in map(Strategy, VGG16_GOODPUT)}
        how = _EVENTS if trace is not None else "as the paper accounts"
        for strategy, value in ours.items():
            yield Comparison(
                what=f"VGG16, every {interval}: goodput of {strategy}, iterations/s",
                source="figure 9a, artifact",
                paper=VGG16_GOODPUT[strategy][k],
                ours=value,
                note=how,
            )
        for other in (Strategy.CHECKFREQ, Strategy.GPM, Strategy.IDEAL):
            yield Comparison(
                what=f"VGG16, every {interval}: PCcheck / {other}",
                source="figure 9a, artifact",
                paper=VGG16_GOODPUT["pccheck"][k] / VGG16_GOODPUT[other][k],
                ours=ours[Strategy.PCCHECK] / ours[other],
                note=how,
            )


def _vgg_goodput(strategy: Strategy, k: int, trace: Trace | None) -> float:
    interval = VGG16_INTERVALS[k]
    ideal = strategy is Strategy.IDEAL
    plain_s = 1 / VGG16_PLAIN["pccheck" if ideal else strategy]
    per_s = 1 / plain_s if ideal else VGG16_THROUGHPUT[strategy][k]
    costs = vgg_costs(strategy, interval, per_s)
    if trace is not None:
        return _replay(costs, trace, iteration_s=plain_s, interval=interval).goodput
    course = stretch(costs, iteration_s=plain_s, interval=interval)
    redo = redo_s(
        costs,
        iteration_s=plain_s,
        interval=interval,
        persist_s=course.persist_s if strategy is Strategy.PCCHECK else 0.0,
        one=strategy is Strategy.CHECKFREQ,
    )
    return Account(
        per_s=per_s, plain_s=plain_s, redo_s=redo, rollbacks=ROLLBACKS, duration_s=TRACE_S
    ).goodput


def figure_8(_trace: Trace | None) -> Iterator[Comparison]:
    """Slowdowns that the text gives, from sizes and bandwidths alone: nothing is fitted."""
    opt, at = OPT_1_3B, opt_setting()
    for name, paper in opt.slowdown_50:
        yield _slowdown(at, Strategy(name), 50, paper, "OPT-1.3B", "section 5.2.1")
    yield _slowdown(at, Strategy.CHECKFREQ, 100, opt.checkfreq_100, "OPT-1.3B", "section 5.2.2")
    for strategy, per_s in (
        (Strategy.CHECKFREQ, opt.checkfreq_per_s),
        (Strategy.PCCHECK, opt.pccheck_per_s),
    ):
        course = stretch(
            costs_of(strategy, at), iteration_s=at.job.iteration_s, interval=opt.interval
        )
        yield Comparison(
            what=f"OPT-1.3B, every {opt.interval}: {strategy}, iterations/s",
            source=_EXAMPLE,
            paper=per_s,
            ours=course.iterations_per_s,
        )
    job = Job(iteration_s=OPT_2_7B_ITERATION_S, state_bytes=OPT_2_7B_BYTES)
    large = Setting(job, at.rates, IN_FLIGHT["opt-2.7b"])
    for interval, paper in OPT_2_7B_GEMINI:
        yield _slowdown(large, Strategy.GEMINI, interval, paper, "OPT-2.7B", "section 5.2.1")


def _slowdown(
    at: Setting, strategy: Strategy, interval: int, paper: float, *where: str
) -> Comparison:
    model, source = where
    course = stretch(costs_of(strategy, at), iteration_s=at.job.iteration_s, interval=interval)
    return Comparison(
        what=f"{model}, every {interval}: slowdown of {strategy}",
        source=source,
        paper=paper,
        ours=course.slowdown,
    )


def equation_4(_trace: Trace | None) -> Iterator[Comparison]:
    """The bound of equation 4 beside the worst recovery in the course of events, OPT-1.3B."""
    at, t = opt_setting(), opt_iteration_s()
    for strategy in (Strategy.GPM, Strategy.CHECKFREQ, Strategy.PCCHECK, Strategy.OURS):
        costs = costs_of(strategy, at)
        for interval in (1, 10, 25, 50, 100):
            course = stretch(costs, iteration_s=t, interval=interval)
            yield Comparison(
                what=f"{strategy}, every {interval}: worst recovery, s",
                source="equation 4",
                paper=bound_s(costs, iteration_s=t, interval=interval, persist_s=course.persist_s),
                ours=costs.load_s + course.worst_lost * t,
                note="a bound: at most 1 is right",
            )
