"""The arithmetic of intervals, against what it is derived from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.policy import Costs, Interval, Limits, choose_interval, daly_interval_s
from ckpt_core.policy.interval import Reason, pile_up_steps

seconds = st.floats(1e-4, 1e4)


def test_a_save_is_amortised_over_the_interval() -> None:
    assert choose_interval(Costs(1.0, 1.0), Limits(0.05)) == Interval(20, Reason.OVERHEAD)


def test_a_rounding_error_does_not_cost_a_step() -> None:
    assert choose_interval(Costs(0.1, 0.14), Limits(0.05)).steps == 28


def test_saves_that_cost_nothing_come_at_every_step() -> None:
    assert choose_interval(Costs(0.1, 0.0), Limits()).steps == 1


def test_persists_do_not_pile_up() -> None:
    """PCcheck 3.4: f* = ceil(Tw / (N q t))."""
    limits = Limits(0.05, in_flight=2)
    assert pile_up_steps(Costs(0.1, 0.0, 42.0), limits) == math.ceil(42 / (2 * 1.05 * 0.1))
    assert choose_interval(Costs(0.1, 0.0, 42.0), limits) == Interval(200, Reason.PERSIST)


def test_the_young_daly_optimum_is_taken_where_it_is_longer() -> None:
    costs = Costs(1.0, 1.0)
    assert choose_interval(costs, Limits(0.05, mtbf_s=24 * 3600)).reason is Reason.MTBF
    assert choose_interval(costs, Limits(0.05, mtbf_s=60)).reason is Reason.OVERHEAD


def test_max_steps_wins_over_everything_and_min_steps_over_the_rest() -> None:
    assert choose_interval(Costs(1.0, 9.0), Limits(max_steps=7)) == Interval(7, Reason.AT_MOST)
    assert choose_interval(Costs(1.0, 0.0), Limits(min_steps=7)) == Interval(7, Reason.AT_LEAST)


@given(iteration=seconds, save=seconds, share=st.floats(0.001, 1))
def test_the_bound_holds_and_one_step_less_would_break_it(
    iteration: float, save: float, share: float
) -> None:
    steps = choose_interval(Costs(iteration, save), Limits(share)).steps
    assert save <= share * steps * iteration * (1 + 1e-6)
    if steps > 1:
        assert save > share * (steps - 1) * iteration * (1 - 1e-6)


@given(save=st.floats(0.01, 100), mtbf=st.floats(1000, 1e7))
def test_no_other_interval_loses_less_time(save: float, mtbf: float) -> None:
    """Daly's expected run time for exponential failures (his equation 13), around his own optimum."""

    def lost(interval: float) -> float:
        return math.exp((interval + save) / mtbf) / interval - 1 / interval

    best = daly_interval_s(save, mtbf)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost(best) <= lost(best * factor) * 1.001


def test_failures_that_come_faster_than_saves_leave_no_better_interval() -> None:
    assert daly_interval_s(100.0, 30.0) == 30.0


@pytest.mark.parametrize("mtbf", [600.0, 86400.0])
def test_the_optimum_begins_with_youngs(mtbf: float) -> None:
    assert daly_interval_s(0.1, mtbf) == pytest.approx(math.sqrt(2 * 0.1 * mtbf), rel=0.02)
