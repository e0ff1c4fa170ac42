"""The search beside an exhaustive one, on surfaces that are known: made up, and recorded from a disk."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.policy.tuning import (
    AXES,
    Axes,
    Candidate,
    Limits,
    Measure,
    Plan,
    Space,
    exhaustive,
    search,
    space_of,
    sureness_of,
)
from tests.quick import drawn

MIB = 2**20
STATE = 768 * MIB
LIMITS = Limits(STATE, STATE, 3 * STATE, 20 * STATE, keep_last=2)
SPACE = space_of(LIMITS)
START = SPACE.nearest(Candidate(2, 8, 8 * MIB, 2 * STATE))
RECORDED = Path(__file__).with_name("tuning_surface.json")

Surface = Callable[[Candidate], float]


def surface_of(space: Space, seed: int) -> Surface:
    """One lowest place, slopes of its own along each axis, and in flight and writers hinder each other.

    Buffered writes want fewer writers than direct ones: each of them waits for less.
    """
    draw = random.Random(seed)
    best = {axis: draw.choice(getattr(space.axes, axis)) for axis in AXES}
    slopes = {axis: draw.uniform(0, 0.35) for axis in AXES}
    hindrance = draw.uniform(0, 0.1)
    threads = best["in_flight"] * best["writers"]
    fewer = draw.choice((0, 1, 2))
    buffered = {"auto": 0, "off": 1}

    def cost(candidate: Candidate) -> float:
        value = 1.0
        for axis in AXES:
            places = getattr(space.axes, axis)
            lowest = places.index(best[axis])
            if axis == "writers":
                # Less the other way where the lowest place is a buffered one.
                shift = buffered[best["direct_io"]] - buffered[candidate.direct_io]
                lowest = min(max(lowest + fewer * shift, 0), len(places) - 1)
            away = abs(places.index(getattr(candidate, axis)) - lowest)
            value *= 1 + slopes[axis] * away
        return value * (
            1 + hindrance * abs(math.log2(candidate.in_flight * candidate.writers / threads))
        )

    return cost


def noisy(cost: Surface, *, noise: float, seed: int) -> Measure:
    draw = random.Random(seed)
    return lambda candidate: cost(candidate) * (1 + draw.uniform(-noise, noise))


def excess(space: Space, cost: Surface, chosen: Candidate) -> float:
    """By what part the choice is above the lowest place."""
    return cost(chosen) / min(map(cost, space.candidates())) - 1


@given(seed=st.integers(0, 2**32))
@settings(max_examples=drawn(60), deadline=None, derandomize=True)
def test_within_a_tenth_of_the_best_on_a_surface_with_little_noise(seed: int) -> None:
    cost = surface_of(SPACE, seed)
    found = search(SPACE, noisy(cost, noise=0.02, seed=seed), start=START, plan=Plan(seed=seed))
    assert excess(SPACE, cost, found.best) <= 0.1


def test_within_a_tenth_nearly_always_when_turns_differ_by_a_fifth() -> None:
    missed = 0
    for seed in range(60):
        cost = surface_of(SPACE, seed)
        found = search(SPACE, noisy(cost, noise=0.1, seed=seed), start=START, plan=Plan(seed=seed))
        missed += excess(SPACE, cost, found.best) > 0.1
    assert missed <= 2


def test_a_tenth_of_the_turns_of_an_exhaustive_search() -> None:
    cost = surface_of(SPACE, 1)
    measure = noisy(cost, noise=0.03, seed=1)
    found, whole = (find(SPACE, measure, start=START) for find in (search, exhaustive))
    assert set(whole.samples) == set(SPACE.candidates())
    assert found.turns * 10 < whole.turns
    assert cost(found.best) <= 1.1 * cost(whole.best)


def test_direct_io_takes_few_turns_more() -> None:
    def turns(space: Space) -> int:
        return sum(
            search(space, noisy(surface_of(space, seed), noise=0.02, seed=seed), start=START).turns
            for seed in range(60)
        )

    assert turns(SPACE) <= 1.4 * turns(space_of(LIMITS, Axes(direct_io=("auto",))))


@pytest.mark.parametrize("fewest", [1, 2])
def test_buffered_writes_that_are_better_with_far_fewer_writers_are_found(fewest: int) -> None:
    # From 8 or 16 direct writers no step along one axis is better.
    numbers = SPACE.axes.writers

    def cost(candidate: Candidate) -> float:
        lowest = fewest if candidate.direct_io == "off" else 16
        away = abs(numbers.index(candidate.writers) - numbers.index(lowest))
        return (0.8 if candidate.direct_io == "off" else 1.0) * (1 + 0.2 * away)

    for seed in range(20):
        measure = noisy(cost, noise=0.02, seed=seed)
        best = search(SPACE, measure, start=START, plan=Plan(seed=seed)).best
        assert (best.writers, best.direct_io) == (fewest, "off")


def test_a_recorded_disk_with_all_its_bumps_is_searched_nearly_as_well_as_exhaustively() -> None:
    # Medians of turns that differed by three quarters: the machine was busy, so it has many hollows.
    recorded = json.loads(RECORDED.read_text())
    turns = {Candidate(*row["candidate"]): row["turns_s"] for row in recorded["measured"]}
    truth = {candidate: statistics.median(values) for candidate, values in turns.items()}
    axes = Axes(*(tuple(sorted({getattr(c, axis) for c in turns})) for axis in AXES))
    space = space_of(Limits(**recorded["limits"]), axes)
    assert set(space.candidates()) == set(turns)
    over, start = [], Candidate(*recorded["start"])
    for seed in range(20):
        measure = noisy(truth.__getitem__, noise=0.02, seed=seed)
        found = search(space, measure, start=start, plan=Plan(seed=seed))
        over.append(excess(space, truth.__getitem__, found.best))
        assert found.turns < sum(map(len, turns.values())) / 2
    assert sum(part > 0.1 for part in over) <= 2
    assert max(over) < 0.2


def test_of_equally_fast_ones_the_cheapest_finalist_is_taken() -> None:
    axes = Axes((1, 2), (4,), (MIB,), (64 * MIB, 128 * MIB))
    space = space_of(LIMITS, axes)
    found = search(space, lambda candidate: 1.0, start=Candidate(2, 4, MIB, 128 * MIB))
    assert found.best == Candidate(1, 4, MIB, 64 * MIB)


def test_of_equally_fast_ones_direct_writes_are_taken() -> None:
    space = space_of(LIMITS, Axes((2,), (4, 8), (MIB,), (64 * MIB,)))
    found = search(space, lambda candidate: 1.0, start=Candidate(2, 4, MIB, 64 * MIB, "off"))
    assert found.best == Candidate(2, 4, MIB, 64 * MIB, "auto")


def test_finals_are_fresh_turns_with_the_start_among_them() -> None:
    cost = surface_of(SPACE, 3)
    found = search(SPACE, cost, start=START, plan=Plan(rounds=4))
    assert START in found.finals
    assert {len(turns) for turns in found.finals.values()} == {4}
    for finalist, turns in found.finals.items():
        assert found.samples[finalist][-4:] == turns
    assert sureness_of(found).gain >= 1


def test_the_same_seed_searches_in_the_same_order() -> None:
    def asked(seed: int) -> list[Candidate]:
        order: list[Candidate] = []
        cost = surface_of(SPACE, 5)

        def measure(candidate: Candidate) -> float:
            order.append(candidate)
            return cost(candidate)

        search(SPACE, measure, start=START, plan=Plan(seed=seed))
        return order

    assert asked(1) == asked(1) != asked(2)


@pytest.mark.parametrize("find", [search, exhaustive])
@pytest.mark.parametrize("turns", [0, 1, 7])
def test_ended_early_it_recommends_the_best_it_has_seen(
    find: Callable[..., object], turns: int
) -> None:
    count = itertools.count()
    cost = surface_of(SPACE, 7)
    found = search(SPACE, cost, start=START, enough=lambda: next(count) >= turns)
    assert not found.complete
    assert found.best in found.samples
    assert len(found.samples) <= turns + 2
    assert cost(found.best) <= 1.03 * min(map(cost, found.samples))


def test_what_a_turn_raises_ends_the_search() -> None:
    def broken(candidate: Candidate) -> float:
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        search(SPACE, broken, start=START)


def test_a_space_of_one_needs_no_more_than_the_finals() -> None:
    space = space_of(LIMITS, Axes((1,), (2,), (MIB,), (64 * MIB,), ("off",)))
    only = space.candidates()[0]
    found = search(space, lambda candidate: 2.0, start=only, plan=Plan(rounds=3))
    assert (found.best, found.turns) == (only, 3)
    sure = sureness_of(found)
    assert (sure.rival, sure.clear, sure.spread, sure.gain) == (None, True, 0.0, 1.0)
