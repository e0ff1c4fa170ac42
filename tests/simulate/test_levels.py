"""Further levels: against a clock that ticks, and what must hold of any of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core import ConfigError
from ckpt_core.simulate import (
    Costs,
    FurtherLevel,
    Goal,
    Kind,
    Outage,
    Outcome,
    Redundancy,
    Sharing,
    exponential,
    of_kinds,
    of_nodes,
    simulate,
    stretch,
)
from ckpt_core.simulate.levels import Holdings
from ckpt_core.simulate.redundancy import Losses
from tests.quick import drawn
from tests.simulate.drawn import ITERATION_S, costs, eighths
from tests.simulate.naive import Naive

TICK_S = 1 / 8
KINDS = st.sampled_from(Kind)
EVERYS = st.integers(1, 30)


@st.composite
def levels(draw: st.DrawFn) -> tuple[FurtherLevel, ...]:
    made = st.builds(
        FurtherLevel, every=EVERYS, copy_s=eighths(30), restore_s=eighths(8), survives=KINDS
    )
    return tuple(draw(st.lists(made, max_size=3)))


def run(made: Costs, outages: Sequence[Outage], duration_s: float, interval: int) -> Outcome:
    goal = Goal(duration_s=duration_s)
    return simulate(made, outages, goal, iteration_s=ITERATION_S, interval=interval)


class Ticking:
    """One level of one stretch, tick by tick."""

    def __init__(self, level: FurtherLevel, held: int) -> None:
        self.level, self.held = level, held
        self.sending: tuple[float, int] | None = None
        self.seen = held

    def tick(self, now_s: float, newest: int) -> None:
        """What has come by now, and what is begun; `newest` wanted one in the first root."""
        while True:
            if self.sending is not None:
                if self.sending[0] > now_s:
                    return
                self.held, self.sending = self.sending[1], None
            if newest <= self.seen:
                return
            self.seen = newest
            self.sending = (now_s + self.level.copy_s, newest)


def ticking(
    made: Costs, outages: Sequence[Outage], duration_s: float, interval: int
) -> tuple[int, int]:
    """Iterations that count at the end, and those that were lost."""
    base = redone = 0
    held = [0] * (1 + len(made.levels))
    ready_s = 0.0
    for outage in [*outages, Outage(duration_s, duration_s)]:
        up_s = min(outage.at_s, duration_s) - ready_s
        course, done = Naive(made, ITERATION_S, interval), base
        while up_s > 0 and course.iterate() <= up_s:
            done += 1
        if outage.at_s >= duration_s:
            return done, redone
        if up_s > 0:
            held = _after(made, course, base, held, up_s)
        kept = [
            there if survives.rank >= outage.kind.rank else 0
            for there, survives in zip(
                held, [made.survives, *[one.survives for one in made.levels]], strict=True
            )
        ]
        held, left = kept, max(kept)
        loads_s = [made.load_s, *[one.restore_s for one in made.levels]]
        base, redone = left, redone + done - left
        ready_s = max(ready_s, outage.back_s + loads_s[kept.index(left) if left else 0])
    raise AssertionError


def _after(made: Costs, course: Naive, base: int, held: list[int], up_s: float) -> list[int]:
    commits = [(at_s, base + k * course.interval) for k, at_s in enumerate(course.commits_s, 1)]
    there = [(0.0, base), *[one for one in commits if one[0] <= up_s]]
    further = []
    for level, before in zip(made.levels, held[1:], strict=True):
        clock = Ticking(level, before)
        for tick in range(int(up_s / TICK_S) + 1):
            now_s = tick * TICK_S
            wanted = [step for at_s, step in there if at_s <= now_s and step % level.every == 0]
            clock.tick(now_s, max(wanted, default=0))
        further.append(clock.held)
    return [there[-1][1], *further]


@settings(max_examples=drawn(60), deadline=None)
@given(
    costs(Sharing.OLDEST_FIRST).filter(lambda made: not made.update_wait_s),
    KINDS,
    levels(),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 100), KINDS), max_size=5),
    st.integers(1, 100),
)
def test_it_agrees_with_a_clock_that_ticks(
    made: Costs,
    survives: Kind,
    further: tuple[FurtherLevel, ...],
    interval: int,
    gaps: list[tuple[int, Kind]],
    last: int,
) -> None:
    made = dataclasses.replace(made, survives=survives, levels=further)
    times = itertools.accumulate(gap for gap, _ in gaps)
    outages = [
        Outage(at + 1 / 16, at + 1 / 16, kind) for at, (_, kind) in zip(times, gaps, strict=True)
    ]
    duration_s = sum(gap for gap, _ in gaps) + last + 1 / 16
    found = run(made, outages, duration_s, interval)
    assert (found.iterations, found.redone) == ticking(made, outages, duration_s, interval)


def left(made: Costs, kind: Kind, interval: int, up_s: float) -> int:
    """The iteration that a first failure leaves."""
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    return Holdings(made, course).fail(kind, 0, up_s)[0]


ONE_FAILURE = (costs(), levels(), KINDS, st.integers(1, 12), st.integers(1, 4000))


@given(*ONE_FAILURE, st.integers(2, 5))
def test_a_level_that_gets_steps_more_often_and_keeps_up_never_loses_more(
    made: Costs,
    further: tuple[FurtherLevel, ...],
    kind: Kind,
    interval: int,
    up_s: int,
    times: int,
) -> None:
    course = stretch(made, iteration_s=ITERATION_S, interval=interval)
    further = tuple(
        dataclasses.replace(one, copy_s=min(one.copy_s, course.least_gap_s)) for one in further
    )
    often = dataclasses.replace(made, survives=Kind.PROCESS, levels=further)
    rare = [dataclasses.replace(one, every=one.every * times) for one in further]
    rarely = dataclasses.replace(often, levels=tuple(rare))
    assert left(often, kind, interval, up_s) >= left(rarely, kind, interval, up_s)


@given(*ONE_FAILURE)
def test_one_level_more_never_loses_more(
    made: Costs, further: tuple[FurtherLevel, ...], kind: Kind, interval: int, up_s: int
) -> None:
    found = [
        left(dataclasses.replace(made, survives=Kind.PROCESS, levels=some), kind, interval, up_s)
        for some in (further[:-1], further)
    ]
    assert found[0] <= found[1]


@given(*ONE_FAILURE)
def test_a_worse_failure_never_loses_less(
    made: Costs, further: tuple[FurtherLevel, ...], kind: Kind, interval: int, up_s: int
) -> None:
    held = dataclasses.replace(made, survives=kind, levels=further)
    found = [left(held, one, interval, up_s) for one in Kind]
    assert found == sorted(found, reverse=True)


@given(costs(), st.integers(1, 12), st.integers(0, 1000), KINDS)
def test_a_root_that_survives_all_is_as_good_as_a_copy_that_takes_no_time(
    made: Costs, interval: int, seed: int, kind: Kind
) -> None:
    outages = list(itertools.islice(exponential(120.0, seed=seed), 60))
    outages = list(of_kinds(outages, {kind: 1.0, Kind.NODE: 1.0}, seed=seed))
    level = FurtherLevel(every=1, copy_s=0.0, restore_s=made.load_s, survives=Kind.SITE)
    further = dataclasses.replace(made, survives=Kind.PROCESS, levels=(level,))
    assert run(made, outages, 3000.0, interval) == run(further, outages, 3000.0, interval)


@given(costs(), levels(), KINDS, st.integers(1, 12), st.integers(0, 1000))
def test_every_second_is_accounted_for_with_levels_too(
    made: Costs, further: tuple[FurtherLevel, ...], survives: Kind, interval: int, seed: int
) -> None:
    made = dataclasses.replace(made, survives=survives, levels=further)
    shares = {Kind.PROCESS: 3.0, Kind.NODE: 2.0, Kind.SITE: 1.0}
    outages = list(itertools.islice(exponential(120.0, seed=seed), 100))
    found = run(made, list(of_kinds(outages, shares, seed=seed)), 5000.0, interval)
    trained_s = (found.iterations + found.redone) * ITERATION_S
    assert trained_s + found.stalled_s + found.down_s == pytest.approx(found.wall_s)
    assert found.iterations >= 0 and found.redone >= found.worst_lost


def test_a_job_whose_steps_are_all_gone_begins_anew() -> None:
    made = Costs(load_s=1.0, survives=Kind.PROCESS)
    found = run(made, [Outage(50.5, 50.5, Kind.NODE)], 100.0, 10)
    assert (found.iterations, found.redone) == (48, 50)


def test_a_copy_in_the_domain_of_its_node_goes_with_the_domain() -> None:
    near = FurtherLevel(every=10, copy_s=0.0, restore_s=0.0, survives=Kind.NODE)
    far = dataclasses.replace(near, survives=Kind.DOMAIN)
    for level, newest in ((near, 0), (far, 40)):
        made = Costs(survives=Kind.PROCESS, levels=(level,))
        assert left(made, Kind.NODE, 10, 45.0) == 40
        assert left(made, Kind.DOMAIN, 10, 45.0) == newest
        assert left(made, Kind.SITE, 10, 45.0) == 0


def test_a_level_that_lags_passes_over_what_came_meanwhile() -> None:
    level = FurtherLevel(every=10, copy_s=25.0, restore_s=0.0, survives=Kind.SITE)
    made = Costs(survives=Kind.PROCESS, levels=(level,))
    # Sent: 10 at 10 s, 30 at 35 s, 60 at 60 s.
    newest = {34.0: 0, 35.0: 10, 59.0: 10, 60.0: 30, 84.0: 30, 85.0: 60}
    assert {up_s: left(made, Kind.NODE, 10, up_s) for up_s in newest} == newest


def test_kinds_come_as_often_as_their_shares_and_at_the_same_times() -> None:
    before = list(itertools.islice(exponential(10.0, seed=1), 4000))
    after = list(of_kinds(before, {Kind.PROCESS: 3.0, Kind.NODE: 1.0, Kind.SITE: 0.0}, seed=1))
    assert [one.at_s for one in before] == [one.at_s for one in after]
    assert sum(one.kind is Kind.PROCESS for one in after) == pytest.approx(3000, rel=0.05)
    assert not any(one.kind is Kind.SITE for one in after)


@pytest.mark.parametrize("field", ["every", "copy_s", "restore_s"])
def test_numbers_out_of_range_are_refused(field: str) -> None:
    good = {"every": 1, "copy_s": 0.0, "restore_s": 0.0, "survives": Kind.NODE}
    with pytest.raises(ConfigError):
        FurtherLevel(**{**good, field: -1})


@given(
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 100)), max_size=30),
)
def test_parity_is_lost_when_more_of_a_group_are_gone_at_a_time_than_it_spares(
    k: int, spare: int, groups: int, refill_s: int, drawn_losses: list[tuple[int, int]]
) -> None:
    nodes = (k + spare) * groups
    shape = Redundancy(nodes=nodes, group=k + spare, spare=spare, refill_s=refill_s)
    losses, at_s, lost = Losses(shape), 0, dict[int, int]()
    for gap_s, number in drawn_losses:
        at_s += gap_s
        lost[number % nodes] = at_s
        mates = range(number % nodes // (k + spare) * (k + spare), nodes)[: k + spare]
        gone = [one for one in mates if one in lost and at_s - lost[one] < refill_s]
        expected = len({*gone, number % nodes}) > spare
        assert losses.lose(number % nodes, at_s) == expected


def test_a_copy_at_the_next_node_is_lost_with_a_neighbour_and_nobody_else() -> None:
    for other, is_lost in ((0, False), (1, True), (2, False), (3, False), (4, True)):
        losses = Losses(Redundancy(nodes=5, refill_s=10.0))
        assert not losses.lose(0, 100.0)
        assert losses.lose(other, 109.0) == is_lost
        assert not losses.lose((other + 2) % 5, 120.0)


def test_what_nodes_keep_of_one_another_goes_with_the_second_loss_and_is_made_anew() -> None:
    pair = Redundancy(nodes=2, group=2, spare=1, refill_s=30.0)
    level = FurtherLevel(every=10, copy_s=0.0, restore_s=0.0, survives=Kind.DOMAIN, redundancy=pair)
    made = Costs(survives=Kind.PROCESS, levels=(level,))
    outages = [Outage(at, at, node=node) for at, node in ((45.5, 0), (60.5, 1), (105.5, 0))]
    # 40 are left of 45; 55 of 60 are gone with all before; then 40 of 45 are left again.
    found = run(made, outages, 120.0, 10)
    assert (found.redone, found.worst_lost, found.iterations) == (5 + 55 + 5, 55, 54)


def test_nodes_are_lost_equally_often_and_processes_take_none() -> None:
    before = list(
        of_kinds(
            itertools.islice(exponential(10.0, seed=1), 4000),
            {Kind.PROCESS: 1.0, Kind.NODE: 1.0},
            seed=1,
        )
    )
    after = list(of_nodes(before, 4, seed=1))
    assert [dataclasses.replace(one, node=None) for one in after] == before
    assert all((one.node is None) == (one.kind is not Kind.NODE) for one in after)
    counts = [sum(one.node == node for one in after) for node in range(4)]
    assert min(counts) > 400 and sum(counts) == sum(one.kind is Kind.NODE for one in after)
