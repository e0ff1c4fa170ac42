"""Training without failures: against a plain loop, closed forms and PCcheck's equations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core import ConfigError
from ckpt_core.simulate import Costs, Sharing, bound_s, stretch
from tests.quick import drawn
from tests.simulate.drawn import ITERATION_S, costs, eighths
from tests.simulate.naive import Naive

INTERVALS = st.integers(1, 12)


@settings(max_examples=drawn(100))
@given(costs(Sharing.OLDEST_FIRST), INTERVALS, st.data())
def test_it_agrees_with_a_loop_over_iterations(
    made: Costs, interval: int, data: st.DataObject
) -> None:
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    naive = Naive(made, ITERATION_S, interval)
    ends_s = [0.0, *(naive.iterate() for _ in range(25 * interval))]
    for number in range(0, len(ends_s), interval):
        assert course.time_of(number) == pytest.approx(ends_s[number])
    at_s = data.draw(eighths(int(ends_s[-1]))) + 1 / 16  # between any two events
    if at_s < ends_s[-1]:
        assert course.checkpoints_at(at_s) == naive.committed(at_s)
        whole = sum(end_s <= at_s for end_s in ends_s[1:])
        # A wait within an interval is spread over it; the loop has it where it is.
        waits = made.update_wait_s / ITERATION_S
        assert abs(course.iterations_at(at_s) - whole) <= 1 + waits


@given(costs(), INTERVALS)
def test_no_failure_takes_more_than_equation_4_allows(made: Costs, interval: int) -> None:
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    worst_s = made.load_s + course.worst_lost * ITERATION_S
    most_s = bound_s(made, iteration_s=ITERATION_S, interval=interval, persist_s=course.persist_s)
    assert worst_s <= most_s + 1e-6


@given(costs(), INTERVALS)
def test_the_mean_loss_lies_below_the_worst(made: Costs, interval: int) -> None:
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    # The mean counts the part of an iteration that is under way.
    assert 0 <= course.mean_lost <= course.worst_lost + 1 + 1e-6


@settings(max_examples=drawn(40))
@given(costs(), INTERVALS)
def test_the_mean_loss_is_that_of_many_moments(made: Costs, interval: int) -> None:
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    begin_s = course.resumed_s[course.first] + 50 * course.period_s
    moments = 501
    lost = [
        course.iterations_at(at_s) - course.checkpoints_at(at_s) * interval
        for at_s in (begin_s + course.period_s * (k + 0.37) / moments for k in range(moments))
    ]
    # Whole iterations are half a one fewer, on average, while training is under way.
    assert sum(lost) / moments == pytest.approx(course.mean_lost - 0.25, abs=0.3)


@given(eighths(30), INTERVALS, st.integers(1, 4), st.sampled_from(Sharing))
def test_storage_that_is_too_slow_sets_the_pace(
    persist_s: float, interval: int, in_flight: int, sharing: Sharing
) -> None:
    made = Costs(persist_s=persist_s, in_flight=in_flight, sharing=sharing)
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    # PCcheck 3.4, runtime_2 per checkpoint: with T_w / N the time that storage needs for one.
    assert course.slowdown == pytest.approx(max(1.0, persist_s / interval), rel=1e-6)


@given(eighths(10), INTERVALS)
def test_a_synchronous_save_costs_its_time(stall_s: float, interval: int) -> None:
    course = stretch(Costs(stall_s=stall_s), iteration_s=ITERATION_S, interval=interval)
    assert course.slowdown == pytest.approx(1 + stall_s / interval)
    assert course.worst_lost == interval


def test_one_at_a_time_loses_two_intervals_at_most_and_reaches_that() -> None:
    made = Costs(persist_s=10.0)
    course = stretch(made, iteration_s=1.0, interval=10)
    assert course.worst_lost == 20


def test_the_oldest_first_commits_earlier_than_equal_shares() -> None:
    times = {}
    for sharing in Sharing:
        made = Costs(persist_s=15.0, in_flight=2, sharing=sharing)
        times[sharing] = stretch(made, iteration_s=1.0, interval=10)
    oldest, equal = times[Sharing.OLDEST_FIRST], times[Sharing.EQUAL]
    assert oldest.slowdown == pytest.approx(equal.slowdown)
    assert oldest.persist_s <= equal.persist_s
    # What differs is a young stretch, and so clusters that fail often.
    assert (oldest.committed_s[1], equal.committed_s[1]) == (25.0, 30.0)


def test_pccheck_runtime_of_a_whole_run() -> None:
    # Section 3.4, runtime_1: f t + max(T_w, f t) (A / f - 1) + T_w. The last T_w is the last persist,
    # which begins when the checkpoint has its place and training would go on.
    persist_s, interval, total = 37.0, 10, 1000
    course = stretch(Costs(persist_s=persist_s), iteration_s=1.0, interval=interval)
    goes_on_s = course.time_of(total + 1) - 1.0
    assert goes_on_s == pytest.approx(interval + persist_s * (total / interval - 1))


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match="interval"):
        stretch(Costs(), iteration_s=1.0, interval=interval)


@pytest.mark.parametrize("in_flight", [0, 65])
def test_a_number_in_flight_out_of_range_is_refused(in_flight: int) -> None:
    with pytest.raises(ConfigError, match="in_flight"):
        Costs(in_flight=in_flight)


@pytest.mark.parametrize("sharing", Sharing)
def test_storage_that_is_a_little_too_slow_fills_all_places_in_the_end(sharing: Sharing) -> None:
    made = Costs(persist_s=10.5, in_flight=64, sharing=sharing)
    course = stretch(made, iteration_s=1.0, interval=10)
    assert course.slowdown == pytest.approx(1.05, rel=1e-3)
    assert course.worst_lost >= 640


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="persist_s"):
        Costs(persist_s=value)
