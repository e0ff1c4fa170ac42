"""Auto where not every step is asked about, and where one measurement is far off."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ckpt_core import Auto
from tests.policy.world import Load, World

BOUND = 0.05
HANG_S = 60.0


def watching(world: World) -> Auto:
    policy = Auto(max_overhead=BOUND, clock=world.clock, cache=False)
    policy.watch(world)
    return policy


@pytest.mark.parametrize("every", [2, 3, 10])
def test_a_loop_that_asks_at_some_steps_only_keeps_the_bound(tmp_path: Path, every: int) -> None:
    world = World(tmp_path / "root", Load(noise=0.05))
    policy = watching(world)
    for step in range(1, 3000):
        world._iterate(step)
        if step % every == 0 and policy.should_save(step):
            world._save(step)
    assert world.overhead(300, 3000) <= BOUND
    assert len([step for step in world.saves if step >= 300]) >= 30


@pytest.mark.parametrize("jump", [10, 100])
def test_steps_that_nobody_asks_about_are_iterations_without_saves(
    tmp_path: Path, jump: int
) -> None:
    world = World(tmp_path / "root", Load(noise=0.02))
    policy = watching(world)
    world.run(policy, range(1, 200))
    before, step = policy.interval, 200
    for _ in range(20):
        # What is under way ends first, or all of them would count for it.
        while world._ends:
            world._iterate(step := step + 1)
            policy.due(step)
        for _ in range(jump):
            world._iterate(step := step + 1)
        world.run(policy, range(step + 1, step + 61))
        step += 60
    assert before is not None and policy.interval is not None
    assert policy.interval.steps == pytest.approx(before.steps, rel=0.2)


def test_a_first_interval_ends_sooner_where_iterations_become_slower(tmp_path: Path) -> None:
    """As where data come from a cache at first. By those, it would be of 8,000 steps."""
    world = World(tmp_path / "root", Load(iteration_s=0.01, stall_s=0.5, slowdown=0))
    policy = Auto(max_overhead=BOUND, mtbf=7200, clock=world.clock, cache=False)
    policy.watch(world)
    world.run(policy, range(1, 60))
    slow = Load(iteration_s=1.0, stall_s=0.5, slowdown=0)
    world.run(policy, range(60, 3000), load=lambda step: slow)
    gaps = [end - begin for begin, end in itertools.pairwise(world.saves)]
    assert max(gaps) <= 128
    assert policy.interval is not None
    assert policy.interval.steps == pytest.approx(85, rel=0.1)


def test_one_save_that_hangs_does_not_leave_the_run_unsaved(tmp_path: Path) -> None:
    world = World(tmp_path / "root", Load(noise=0.02))
    policy = watching(world)
    world.run(policy, range(1, 400))
    assert policy.interval is not None
    usual, hangs = policy.interval.steps, world.saves[-1] + policy.interval.steps
    world.run(
        policy,
        range(400, 3000),
        load=lambda step: Load(noise=0.02, stall_s=HANG_S if step == hangs else 0.02),
    )
    later = [step for step in world.saves if step >= hangs]
    assert later[0] == hangs
    # Amortised by itself it would be 12,000 steps.
    gaps = [end - begin for begin, end in itertools.pairwise(later)]
    assert max(gaps) <= 16 * usual
    assert policy.interval.steps == pytest.approx(usual, rel=0.2)


def test_two_dear_saves_in_a_row_are_believed(tmp_path: Path) -> None:
    world = World(tmp_path / "root", Load(noise=0.02))
    policy = watching(world)
    world.run(policy, range(1, 400))
    world.run(policy, range(400, 9000), load=lambda step: Load(noise=0.02, stall_s=20.0))
    assert policy.interval is not None
    assert policy.interval.steps == pytest.approx(20.0 / 0.1 / BOUND, rel=0.1)
