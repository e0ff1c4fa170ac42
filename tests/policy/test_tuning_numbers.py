"""Figures from moments, intervals from figures, and settings that can be pasted."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import Options
from ckpt_core.errors import ConfigError
from ckpt_core.policy.tuning import (
    AXES,
    Candidate,
    Checked,
    Found,
    Load,
    Trace,
    as_environment,
    as_options,
    as_values,
    beside,
    clean_iteration_s,
    iterations_of,
    kept_interval,
    most_lost_s,
    nearest_overhead,
    next_interval,
    size_value,
    sureness_of,
    timing_of,
    typical_loss_s,
)


def steady(*, places: int, write_s: float, saves: int) -> Trace:
    """Storage is always full: the next save begins when the one `places` before it has ended."""
    gap = write_s / places
    spans = tuple((number * gap, number * gap + write_s) for number in range(saves))
    iterations = tuple((number * gap, (number + 1) * gap) for number in range(saves + places))
    return Trace(spans, iterations, 100)


@pytest.mark.parametrize("places", [1, 2, 4])
def test_a_full_pipeline_takes_tw_over_n_for_each_checkpoint(places: int) -> None:
    timing = timing_of(steady(places=places, write_s=2.0, saves=12), warmups=places + 1)
    assert timing is not None
    assert timing.write_s == pytest.approx(2.0)
    assert timing.each_s == pytest.approx(2.0 / places)
    assert timing.busy == pytest.approx(places, rel=0.35)
    assert timing.used == pytest.approx(1.0)
    assert timing.lost_s == 0.0  # every iteration had a save beside it


def test_saves_far_apart_take_tw_however_many_might_be_in_flight() -> None:
    saves = tuple((10.0 * number, 10.0 * number + 1.5) for number in range(6))
    timing = timing_of(Trace(saves, ()), warmups=2)
    assert timing is not None
    assert (timing.each_s, timing.write_s) == (pytest.approx(1.5), pytest.approx(1.5))
    assert timing.used == pytest.approx(0.15)


def test_time_lost_is_told_from_iterations_without_a_save() -> None:
    # Ten iterations for each save: those beside it take 3 s, all others 1 s.
    moments, saves = [0.0], []
    for number in range(80):
        beside = number % 10 == 0
        if beside:
            saves.append((moments[-1] + 0.1, moments[-1] + 2.9))
        moments.append(moments[-1] + (3.0 if beside else 1.0))
    trace = Trace(tuple(saves), iterations_of(moments, ()))
    timing = timing_of(trace, warmups=2)
    assert timing is not None
    assert timing.clean_s == clean_iteration_s(trace) == 1.0
    assert timing.lost_s == pytest.approx(2.0, rel=0.1)
    assert typical_loss_s([timing]) == timing.lost_s


@given(
    saves=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=12),
    lengths=st.lists(st.integers(1, 5), max_size=20),
)
def test_an_iteration_is_beside_a_save_if_any_save_overlaps_it(
    saves: list[tuple[int, int]], lengths: list[int]
) -> None:
    spans = tuple((float(begin), float(begin + length)) for begin, length in saves)
    iterations = tuple(pairwise(accumulate(map(float, lengths), initial=0.0)))
    found: tuple[list[float], list[float]] = [], []
    for begin, end in iterations[1:]:
        found[any(begin < last and first < end for first, last in spans)].append(end - begin)
    assert beside(Trace(spans, iterations)) == found


def test_a_full_pipeline_tells_nothing_of_what_a_save_costs_by_itself() -> None:
    timing = timing_of(steady(places=2, write_s=2.0, saves=12), warmups=3)
    assert timing is not None
    assert typical_loss_s([timing]) == 0.0


def test_what_a_crash_loses_at_most_goes_by_the_slowest_save() -> None:
    # Of nine saves that count one takes 6 s: the median says nothing of it.
    saves = [(10.0 * number, 10.0 * number + 1.5) for number in range(10)]
    saves[5] = (50.0, 56.0)
    slow = timing_of(Trace(tuple(saves), ()), warmups=1)
    quick = timing_of(Trace(tuple(saves[6:]), ()), warmups=1)
    assert slow is not None and quick is not None
    assert (slow.write_s, slow.longest_s) == (1.5, 6.0)
    assert most_lost_s([quick, slow], between_s=4.0, in_flight=2) == 10.0
    assert most_lost_s([quick, slow], between_s=2.0, in_flight=2) == 6.0  # no more were under way
    assert most_lost_s([quick], between_s=4.0, in_flight=2) == 5.5


def test_too_few_saves_give_no_figures() -> None:
    trace = steady(places=1, write_s=1.0, saves=3)
    assert timing_of(trace, warmups=3) is None
    assert timing_of(Trace((), ()), warmups=1) is None
    assert clean_iteration_s(Trace((), ())) == 0.0


@pytest.mark.parametrize("layers", [1, 3])
def test_iterations_are_told_apart_by_the_steps_of_saves(layers: int) -> None:
    barriers = [float(number) for number in range(40 * layers)]
    begins = [(step, step * layers + 0.5 - layers) for step in (5, 10, 25)]
    spans = iterations_of(barriers, begins)
    assert {end - begin for begin, end in spans} == {layers}
    assert len(spans) == 39


def test_barriers_that_come_now_and_then_tell_no_iterations() -> None:
    assert iterations_of([1.0, 2.0, 3.0], [(1, 0.0), (6, 10.0)]) == ()
    assert iterations_of([1.0, 2.0, 11.0], [(1, 0.0), (2, 10.0), (3, 20.0)]) == ()


def test_the_interval_is_the_papers_formula() -> None:
    load = Load(each_s=10.0 / 2, iteration_s=0.5)  # Tw = 10 s, N = 2
    assert load.least_interval(0.05).steps == 10  # ceil(10 / (2 * 1.05 * 0.5)) = ceil(9.52)
    assert load.overhead_at(10) == 0.0
    assert load.overhead_at(5) == pytest.approx(1.0)


def test_what_each_save_loses_lengthens_the_interval() -> None:
    load = Load(each_s=0.1, iteration_s=0.1, lost_s=0.2)
    assert load.least_interval(0.05).steps == 40
    assert load.overhead_at(40) == pytest.approx(0.05)


@given(
    each_s=st.floats(1e-4, 1e3),
    iteration_s=st.floats(1e-3, 100),
    lost_s=st.floats(0, 10),
    bound=st.floats(0.001, 1),
)
def test_the_smallest_interval_keeps_the_bound_and_the_one_before_it_does_not(
    each_s: float, iteration_s: float, lost_s: float, bound: float
) -> None:
    load = Load(each_s, iteration_s, lost_s)
    every = load.least_interval(bound).steps
    assert load.overhead_at(every) <= bound * (1 + 1e-6) + 1e-9
    if every > 1:
        assert load.overhead_at(every - 1) >= bound * (1 - 1e-6) - 1e-6


@pytest.mark.parametrize("iteration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_iteration_takes_time(iteration_s: float) -> None:
    with pytest.raises(ConfigError, match="iteration_s"):
        Load(1.0, iteration_s)


def test_an_interval_that_costs_too_much_is_spread_further() -> None:
    checked = Checked(10, (0.05, 0.1, 0.3))
    assert checked.overhead == 0.1
    assert checked.spread == pytest.approx(0.25)
    assert next_interval([checked], max_overhead=0.05) == 20
    assert next_interval([Checked(10, (0.0501,))], max_overhead=0.05) == 11
    assert next_interval([Checked(10, (9.0,))], max_overhead=0.05) == 80  # one bad minute
    assert nearest_overhead([checked, Checked(20, (0.07,))]).every == 20


@given(smallest=st.integers(1, 500), first=st.integers(1, 500))
def test_the_smallest_interval_is_closed_in_upon(smallest: int, first: int) -> None:
    bound, checks = 0.05, []
    every: int | None = first
    while every is not None:
        checks.append(Checked(every, (bound * smallest / every,)))
        every = next_interval(checks, max_overhead=bound)
        assert len(checks) < 20
    kept = kept_interval(checks, max_overhead=bound)
    assert kept is not None
    assert smallest <= kept.every <= max(first, 1.4 * smallest + 1)


@given(
    st.builds(
        Candidate,
        st.integers(1, 9),
        st.integers(1, 99),
        st.integers(1, 2**24).map(lambda pages: pages * 4096),
        st.integers(1, 2**45),
        st.sampled_from(["auto", "on", "off"]),
    )
)
def test_what_is_printed_makes_the_same_options(candidate: Candidate) -> None:
    pasted = eval(as_options(candidate), {"Options": Options})
    environ = dict(line.split("=", 1) for line in as_environment(candidate))
    for options in (pasted, Options.from_env(environ)):
        assert {axis: getattr(options, axis) for axis in AXES} == as_values(candidate)


def test_direct_io_is_printed_as_text() -> None:
    candidate = Candidate(1, 2, 2**20, 2**23, "off")
    assert as_options(candidate) == (
        'Options(in_flight=1, writers=2, chunk_bytes="1MiB", staging_bytes="8MiB", direct_io="off")'
    )
    assert as_environment(candidate)[-1] == "CKPT_CORE_DIRECT_IO=off"


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**30, "1GiB"), (3 * 2**20, "3MiB"), (4096, "4KiB"), (2**20 + 4096, "1052672"), (5, "5")],
)
def test_round_sizes_are_short(size: int, text: str) -> None:
    assert size_value(size) == text


def test_sureness_counts_rounds_and_says_when_it_cannot_tell() -> None:
    best, rival = Candidate(1, 1, 4096, 2**20), Candidate(2, 1, 4096, 2**20)
    clear = {best: [1.0, 1.1, 1.0, 1.2, 1.0], rival: [2.0, 2.1, 2.0, 2.2, 1.0]}
    sure = sureness_of(Found(best, rival, clear, clear, complete=True))
    assert (sure.wins, sure.rounds, sure.clear) == (4, 5, True)
    assert sure.gain == pytest.approx(2.0)
    assert sure.ahead == pytest.approx(1.0)
    assert sure.spread == pytest.approx(0.2)
    close = {best: [1.0, 1.1, 1.0], rival: [1.0, 1.0, 1.1]}
    assert not sureness_of(Found(best, rival, close, close, complete=True)).clear
