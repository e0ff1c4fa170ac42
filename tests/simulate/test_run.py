"""Whole runs: against a plain loop, against Daly and Young, and how much work they take."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core import ConfigError
from ckpt_core.simulate import (
    Costs,
    Goal,
    Job,
    Outage,
    Rates,
    Setting,
    Sharing,
    Strategy,
    Study,
    bound_s,
    costs_of,
    daly_s,
    exponential,
    run_study,
    simulate,
    stretch,
    young_s,
)
from tests.quick import drawn
from tests.simulate import naive
from tests.simulate.drawn import ITERATION_S, costs

MACHINE = Rates(write=2e9, serial=0.7e9, copy=12e9, read=2e9, network=1.875e9)
SETTING = Setting(Job(iteration_s=1.0, state_bytes=16e9), MACHINE)


@settings(max_examples=drawn(60))
@given(
    costs(Sharing.OLDEST_FIRST).filter(lambda made: not made.update_wait_s),
    st.integers(1, 12),
    st.lists(st.integers(1, 200), max_size=6),
    st.integers(1, 300),
)
def test_it_agrees_with_a_loop_over_iterations(
    made: Costs, interval: int, gaps: list[int], last: int
) -> None:
    outages = [Outage(at + 1 / 16, at + 1 / 16) for at in itertools.accumulate(gaps)]
    duration_s = sum(gaps) + last + 1 / 16
    outcome = simulate(
        made,
        outages,
        Goal(duration_s=duration_s),
        iteration_s=ITERATION_S,
        interval=interval,
    )
    kept, lost = naive.run(made, outages, duration_s, iteration_s=ITERATION_S, interval=interval)
    assert (outcome.iterations, outcome.redone) == (kept, lost)


@given(costs(), st.integers(1, 12), st.integers(0, 1000))
def test_every_second_and_every_iteration_is_accounted_for(
    made: Costs, interval: int, seed: int
) -> None:
    outcome = simulate(
        made,
        exponential(120.0, seed=seed),
        Goal(duration_s=5000.0),
        iteration_s=ITERATION_S,
        interval=interval,
        restart_s=3.0,
    )
    trained_s = (outcome.iterations + outcome.redone) * ITERATION_S
    total_s = trained_s + outcome.stalled_s + outcome.down_s
    assert total_s == pytest.approx(outcome.wall_s)
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    most_s = bound_s(made, iteration_s=ITERATION_S, interval=interval, persist_s=course.persist_s)
    assert outcome.worst_lost * ITERATION_S + made.load_s <= most_s + 1e-6


@given(costs(), st.integers(1, 12), st.integers(1, 400))
def test_no_failure_costs_more_time_than_the_worst_one(
    made: Costs, interval: int, fails_after: int
) -> None:
    def wall_s(*outages: Outage) -> float:
        goal = Goal(iterations=500)
        run = simulate(made, outages, goal, iteration_s=ITERATION_S, interval=interval)
        return run.wall_s

    at_s = fails_after + 1 / 16
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    cost_s = wall_s(Outage(at_s, at_s)) - wall_s()
    assert cost_s <= made.load_s + course.worst_lost_s + 1e-6


def test_the_worst_failure_takes_an_interval_and_the_stall_behind_it() -> None:
    course = stretch(Costs(stall_s=20.0), iteration_s=1.0, interval=10)
    assert course.worst_lost_s == 30.0


def test_without_failures_a_run_takes_what_its_stretch_takes() -> None:
    made = costs_of(Strategy.CHECKFREQ, SETTING)
    outcome = simulate(made, (), Goal(iterations=1000), iteration_s=1.0, interval=10)
    course = stretch(made, iteration_s=1.0, interval=10)
    assert outcome.wall_s == pytest.approx(course.time_of(1000))
    assert (outcome.failures, outcome.redone, outcome.down_s) == (0, 0, 0.0)


@pytest.mark.parametrize("interval", [60, 300, 1200])
@pytest.mark.parametrize("mtbf_s", [1800.0, 7200.0])
def test_the_total_time_is_the_one_that_daly_expects(interval: int, mtbf_s: float) -> None:
    made = Costs(stall_s=30.0, load_s=20.0)
    work = 1200 * 2000
    outcome = simulate(
        made,
        exponential(mtbf_s, seed=1),
        Goal(iterations=work),
        iteration_s=1.0,
        interval=interval,
        restart_s=40.0,
    )
    expected_s = daly_s(work, every_s=interval, cost_s=30.0, recover_s=60.0, mtbf_s=mtbf_s)
    assert outcome.wall_s == pytest.approx(expected_s, rel=0.04)


def test_the_best_interval_is_the_one_of_young() -> None:
    made = Costs(stall_s=20.0)
    best_s = young_s(3600.0, cost_s=20.0)
    totals = {}
    for interval in (
        int(best_s / 4),
        int(best_s / 2),
        int(best_s),
        int(best_s * 2),
        int(best_s * 4),
    ):
        goal = Goal(iterations=1_000_000)
        totals[interval] = simulate(
            made, exponential(3600.0, seed=5), goal, iteration_s=1.0, interval=interval
        ).wall_s
    assert min(totals, key=lambda interval: totals[interval]) == int(best_s)


def test_an_outage_during_a_recovery_begins_it_anew() -> None:
    outages = [Outage(100.0, 100.0), Outage(105.0, 105.0)]
    made = Costs(load_s=10.0)
    outcome = simulate(
        made, outages, Goal(duration_s=200.0), iteration_s=1.0, interval=10, restart_s=5.0
    )
    assert outcome.failures == 2
    assert outcome.down_s == pytest.approx(20.0)
    assert outcome.iterations == 100 + 80


def test_a_job_waits_until_it_may_come_back() -> None:
    outcome = simulate(
        Costs(), [Outage(50.0, 80.0)], Goal(duration_s=100.0), iteration_s=1.0, interval=10
    )
    assert (outcome.iterations, outcome.down_s) == (70, pytest.approx(30.0))


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def once(seed: int) -> object:
        made = costs_of(Strategy.OURS, SETTING)
        outages = exponential(600.0, seed=seed)
        return simulate(made, outages, Goal(duration_s=1e5), iteration_s=1.0, interval=10)

    assert once(3) == once(3)
    assert once(3) != once(4)


@pytest.mark.parametrize("iteration_s", [0.01, 1.0])
def test_ten_thousand_nodes_for_thirty_days_take_one_event_for_each_failure(
    iteration_s: float,
) -> None:
    nodes, node_mtbf_s, duration_s = 10_000, 5000 * 3600.0, 30 * 86400.0
    study = Study(
        setting=Setting(Job(iteration_s=iteration_s, state_bytes=16e9), MACHINE),
        goal=Goal(duration_s=duration_s),
        intervals=(10, 100),
        mtbfs_s=(node_mtbf_s / nodes,),
        restart_s=120.0,
    )
    expected = duration_s / study.mtbfs_s[0]
    for point in run_study(study):
        assert point.failures == pytest.approx(expected, rel=0.1)
        # Nothing is paid for iterations, nodes or seconds: only for failures, and for one course.
        assert point.events - point.failures <= 200


def test_strategies_meet_the_same_failures() -> None:
    study = Study(
        setting=SETTING,
        goal=Goal(duration_s=1e6),
        intervals=(50,),
        mtbfs_s=(3600.0,),
        runs=2,
    )
    points = {point.strategy: point for point in run_study(study)}
    assert len({point.failures for point in points.values()}) == 1
    order = [Strategy.IDEAL, Strategy.OURS, Strategy.GEMINI, Strategy.TORCH_SAVE]
    goodputs = [points[strategy].goodput for strategy in order]
    assert goodputs == sorted(goodputs, reverse=True)


def test_a_goal_that_failures_do_not_let_reach_is_an_error() -> None:
    each_second = (Outage(float(at), float(at)) for at in itertools.count(1))
    with pytest.raises(ConfigError, match="out of reach"):
        simulate(
            Costs(), each_second, Goal(iterations=10, most_outages=500), iteration_s=2.0, interval=1
        )


def test_a_duration_with_more_failures_than_any_job_lives_through_is_an_error() -> None:
    goal = Goal(duration_s=1e9, most_outages=500)
    with pytest.raises(ConfigError, match="after 500 failures"):
        simulate(Costs(), exponential(1.0, seed=0), goal, iteration_s=1.0, interval=1)


@pytest.mark.parametrize(
    "goal", [{}, {"duration_s": 1.0, "iterations": 1}, {"duration_s": 0.0}, {"iterations": -1}]
)
def test_a_goal_is_one_thing_above_zero(goal: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Goal(**goal)  # type: ignore[arg-type]
