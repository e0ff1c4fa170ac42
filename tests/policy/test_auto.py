"""Auto in made-up time, where it is known what saves cost: the bound, changes of load, noise, restarts."""

from __future__ import annotations

import json
import math
import os
import random
import threading
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ckpt_core import Auto, ConfigError, EveryNSteps, EverySeconds, LastStep
from ckpt_core.policy.interval import Reason
from tests.policy.world import Load, World

LIGHT = Load(noise=0.05)
HEAVY = Load(iteration_s=0.15, stall_s=0.08, persist_s=1.5, slowdown=0.5, noise=0.05)
SHORT = Load(iteration_s=0.12, stall_s=0.002, persist_s=0.07, slowdown=0.25, noise=0.03, spread=0.5)
"""Saves that end within an iteration, as on a fast disk."""
QUICK = Load(
    iteration_s=0.139, stall_s=0.002, persist_s=0.07, slowdown=0.15, noise=0.024, spread=0.4
)
BESIDE = Load(iteration_s=0.178, stall_s=0.003, persist_s=0.09, slowdown=0.2, noise=0.1, spread=0.6)
"""As measured by the suite `policy`, alone and beside its second job."""
BOUND = 0.05
ALONE = Load(
    iteration_s=0.122, stall_s=0.002, persist_s=0.07, slowdown=0.06, noise=0.03, spread=0.5
)
JOINED = Load(
    iteration_s=0.145, stall_s=0.004, persist_s=0.12, slowdown=0.28, noise=0.05, spread=0.6
)
"""The same with steady iterations, where a save becomes five times as dear."""
EDGE = 1.1
"""A stretch of a run may hold one save more than its share."""
REACTS_WITHIN = 20
SEEDS = range(5)


def watching(world: World, **more: Any) -> Auto:
    policy = Auto(**({"max_overhead": BOUND, "clock": world.clock} | more))
    policy.watch(world)
    return policy


def test_the_interval_is_the_smallest_that_keeps_the_bound(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = watching(world)
    world.run(policy, range(1, 500))
    # 0.02 s of stall and 4 iterations that take 0.03 s longer: 1.4 iterations.
    assert policy.interval is not None and policy.interval.steps == 28
    assert policy.overhead == pytest.approx(BOUND)
    gaps = {
        later - earlier for earlier, later in zip(world.saves[2:], world.saves[3:], strict=False)
    }
    assert gaps == {28}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.2])
def test_the_bound_holds_in_noise(tmp_path: Path, seed: int, noise: float) -> None:
    world = World(tmp_path / "root", Load(noise=noise), seed=seed)
    world.run(watching(world), range(1, 1500))
    assert world.overhead(100, 1500) <= BOUND * EDGE
    # And it is not kept by saving hardly ever: the ideal number is 50.
    assert len([step for step in world.saves if step >= 100]) >= 32


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", [SHORT, Load(noise=0.03, spread=0.5)])
def test_the_bound_holds_where_saves_differ_from_one_another(
    tmp_path: Path, seed: int, load: Load
) -> None:
    world = World(tmp_path / "root", load, seed=seed)
    world.run(watching(world), range(1, 1500))
    # Half of what the bound allows would be saved for nothing.
    assert BOUND / 2 <= world.overhead(100, 1500) <= BOUND * EDGE


def test_the_bound_holds_for_nearly_every_stretch_of_100_noisy_iterations(tmp_path: Path) -> None:
    load = Load(
        iteration_s=0.126, stall_s=0.002, persist_s=0.35, slowdown=0.09, noise=0.08, spread=0.5
    )
    broken, stretches = 0, range(100, 1500, 100)
    for seed in range(10):
        world = World(tmp_path / f"root{seed}", load, seed=seed)
        world.run(watching(world), range(1, 1500))
        broken += sum(world.overhead(first, first + 100) > BOUND for first in stretches)
        assert world.overhead(100, 1500) >= BOUND / 2
    assert broken <= 0.05 * 10 * len(stretches)


@pytest.mark.parametrize("steps", [5, 20, 100])
@pytest.mark.parametrize("load", [SHORT, Load(noise=0.03)])
def test_iterations_that_wander_do_not_break_the_bound(
    tmp_path: Path, load: Load, steps: int
) -> None:
    """By a tenth of their length, for so many steps at a time."""
    world, drawn = World(tmp_path / "root", load), random.Random(0)
    keep, factors = 1 - 1 / steps, [1.0]
    for _ in range(1500):
        step = 0.1 * math.sqrt(1 - keep**2) * drawn.gauss(0, 1)
        factors.append(1 + keep * (factors[-1] - 1) + step)
    world.run(
        watching(world),
        range(1, 1500),
        load=lambda step: replace(load, iteration_s=load.iteration_s * factors[step]),
    )
    assert BOUND / 2 <= world.overhead(100, 1500) <= BOUND * EDGE


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_holds_within_20_iterations_of_a_heavier_load(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path / "root", LIGHT, seed=seed)
    policy = watching(world)
    world.run(policy, range(1, 300 + seed))
    # Long, since 80 steps lie between two saves: one more than its share must not decide.
    world.run(policy, range(300 + seed, 1300), load=lambda step: HEAVY)
    assert world.overhead(320 + seed, 1300) <= BOUND * EDGE


@pytest.mark.parametrize("phase", range(12))
def test_whenever_a_second_job_begins_what_follows_20_iterations_later_is_within_the_bound(
    tmp_path: Path, phase: int
) -> None:
    world = World(tmp_path / "root", ALONE, seed=phase)
    policy, began = watching(world), 150 + phase
    world.run(policy, range(1, began))
    world.run(policy, range(began, began + 220), load=lambda step: JOINED)
    assert any(
        world.overhead(began + after, began + 120) <= BOUND for after in range(REACTS_WITHIN + 1)
    )
    saves = [step for step in world.saves if step >= began + REACTS_WITHIN]
    gaps = [later - earlier for earlier, later in pairwise(saves)]
    # And it stays there: intervals neither shoot up nor fall back to those of before.
    assert max(gaps) <= 3 * median(gaps)
    assert sum(gap <= 3 for gap in gaps) <= len(gaps) / 5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_base_of_another_minute_makes_no_save_look_free(tmp_path: Path, seed: int) -> None:
    """Intervals of a few steps, and a second job that comes and goes while iterations wander."""
    world, drawn = World(tmp_path / "root", seed=seed), random.Random(seed)
    policy, factor = watching(world), 1.0
    for first in range(1, 1001, 400):
        for load, steps in (
            (QUICK, range(first, first + 150)),
            (BESIDE, range(first + 150, first + 400)),
        ):
            for step in steps:
                factor = 1 + 0.95 * (factor - 1) + drawn.gauss(0, 0.03)
                world.load = replace(load, iteration_s=load.iteration_s * factor)
                world.run(policy, range(step, step + 1))
            assert world.overhead(steps.start + 20, steps.stop) <= BOUND * EDGE


@pytest.mark.parametrize("seed", SEEDS)
def test_the_interval_comes_down_again_with_the_load(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path / "root", HEAVY, seed=seed)
    policy = watching(world)
    world.run(policy, range(1, 400 + seed))
    assert policy.interval is not None and policy.interval.steps >= 70
    world.run(policy, range(400 + seed, 900), load=lambda step: LIGHT)
    assert policy.interval.steps <= 45


def test_iterations_that_grow_slower_all_the_time_are_no_cost_of_saves(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = watching(world)
    world.run(
        policy, range(1, 1000), load=lambda step: Load(iteration_s=0.1 + step * 1e-4, noise=0.02)
    )
    assert policy.interval is not None
    # 0.02 s of stall, and a slowdown of 30 % during the 0.4 s of a persist.
    assert policy.interval.steps == pytest.approx((0.02 + 0.3 * 0.4) / 0.2 / BOUND, rel=0.3)


def test_validations_do_not_pass_for_slow_saves(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = watching(world)
    world.pauses = dict.fromkeys(range(50, 2000, 50), 30.0)
    world.run(policy, range(1, 2000))
    # 70 without them. Each pause looks like 300 iterations that a save made slower.
    assert len(world.saves) >= 20


def test_persists_longer_than_the_interval_still_leave_a_base(tmp_path: Path) -> None:
    load = Load(persist_s=20.0, slowdown=0.0, stall_s=0.001, noise=0.01)
    world = World(tmp_path / "root", load, in_flight=2)
    policy = watching(world)
    world.run(policy, range(1, 4000))
    assert policy.interval is not None and policy.interval.reason is Reason.PERSIST
    assert 80 <= policy.interval.steps <= 110  # 20 s / (2 x 1.05 x 0.1 s)
    assert len(world.saves) >= 25


def test_the_mode_that_costs_less_is_chosen(tmp_path: Path) -> None:
    world = World(tmp_path / "root", choices=("device", "host"))
    world.stall_of = {"device": 0.3, "host": 0.02}
    policy = watching(world)
    world.run(policy, range(1, 200))
    assert world.preferred == ["device", "host", "host"]
    assert policy.profile is not None and policy.profile.mode == "host"


def test_the_mode_that_the_first_rank_tries_or_chooses_is_every_ranks(tmp_path: Path) -> None:
    told: list[Any] = []

    class Second(World):
        def of_first_rank(self, topic: str, value: Any) -> Any:
            return told[-1]

    class First(World):
        def of_first_rank(self, topic: str, value: Any) -> Any:
            told.append(value)
            return value

    worlds = [
        kind(tmp_path / "root", rank=rank, world_size=2, choices=("device", "host"))
        for rank, kind in enumerate((First, Second))
    ]
    policies = [watching(world, cache=False) for world in worlds]
    for world in worlds:
        world.stall_of = {"device": 0.3, "host": 0.02}
    modes = []
    for step in range(1, 200):
        for world, policy in zip(worlds, policies, strict=True):
            world.run(policy, range(step, step + 1))
        modes.append(tuple(world.mode for world in worlds))
    assert worlds[0].preferred == ["device", "host", "host"]
    assert set(modes) == {("host", "host"), ("device", "device")}
    assert worlds[0].saves == worlds[1].saves


def test_an_mtbf_lengthens_the_interval(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = watching(world, mtbf=timedelta(hours=3))
    world.run(policy, range(1, 3000))
    assert policy.interval is not None and policy.interval.reason is Reason.MTBF
    # sqrt(2 x 0.14 s x 10800 s) is 55 s, of iterations of 0.1 s.
    assert policy.interval.steps == pytest.approx(550, rel=0.05)


def test_a_second_start_saves_at_the_interval_of_the_first_one(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    world.run(watching(world), range(1, 200))
    again = World(tmp_path / "root")
    policy = watching(again)
    again.run(policy, range(200, 300))
    assert again.saves[:3] == [208, 236, 264]


def test_a_cached_profile_of_another_model_is_measured_anew(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    world.run(watching(world), range(1, 200))
    other = World(tmp_path / "root", Load(stall_s=0.2), state_bytes=5000)
    policy = watching(other)
    other.run(policy, range(1, 300))
    assert policy.interval is not None and policy.interval.steps >= 60
    kept = json.loads((tmp_path / "root.profile.json").read_text())
    assert kept["profile"]["state_bytes"] == 5000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 99}', "\0"])
def test_a_damaged_cache_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "root.profile.json").write_text(text)
    world = World(tmp_path / "root")
    world.run(watching(world), range(1, 100))
    assert world.saves[:2] == [9, 17]


@pytest.mark.parametrize("reads", [True, False])
def test_a_cache_on_storage_that_hangs_does_not_stop_training(tmp_path: Path, reads: bool) -> None:
    name = "root.profile.json" if reads else f".root.profile.json.{os.getpid()}"
    os.mkfifo(tmp_path / name)  # opening it waits for somebody at its other end
    world = World(tmp_path / "root")
    thread = threading.Thread(target=lambda: world.run(watching(world), range(1, 300)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    alive = thread.is_alive()
    # Lets go of whoever waits, at either end.
    os.close(os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK))
    assert not alive and len(world.saves) > 5


def test_nothing_is_written_without_a_cache(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    world.run(watching(world, cache=False), range(1, 200))
    assert list(tmp_path.iterdir()) == []


def test_training_that_goes_back_keeps_the_interval(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = watching(world)
    world.run(policy, range(1, 200))
    before = policy.interval
    world.saves.clear()
    world.run(policy, range(100, 200))
    assert policy.interval == before
    assert world.saves == [128, 156, 184]


def test_a_question_asked_again_gets_the_same_answer(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = watching(world)
    for step in range(1, 9):
        world.now_s += 0.1
        assert not policy.due(step)
    world.now_s += 0.1
    assert policy.due(9) and policy.due(9)
    policy.saved(9)
    assert not policy.due(9)


def test_in_a_combination_saves_of_the_other_part_are_measured_too(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    policy = Auto(clock=world.clock) | EverySeconds(1, clock=world.clock)
    policy.watch(world)
    world.run(policy, range(1, 200))
    assert len(world.saves) >= 15


@pytest.mark.parametrize("choices", [(), ("device", "host")])
def test_a_wish_that_another_part_must_share_lasts_until_a_save_is_made(
    tmp_path: Path, choices: tuple[str, ...]
) -> None:
    world = World(tmp_path / "root", choices=choices)
    auto = watching(world)
    world.run(auto & EveryNSteps(50), range(1, 1000))
    assert world.saves == list(range(50, 1000, 50))
    assert auto.interval is not None and auto.interval.steps == 28


def test_all_that_is_measured_may_be_saved_at_the_last_step_alone(tmp_path: Path) -> None:
    world = World(tmp_path / "root")
    world.run(watching(world) & LastStep(500), range(1, 521))
    assert world.saves == [500]


def test_max_steps_bounds_what_a_failure_can_cost(tmp_path: Path) -> None:
    world = World(tmp_path / "root", HEAVY)
    policy = watching(world, max_steps=10)
    world.run(policy, range(1, 300))
    assert policy.interval is not None and policy.interval.reason is Reason.AT_MOST
    assert max(b - a for a, b in zip(world.saves, world.saves[1:], strict=False)) <= 30


def test_no_measurement_is_waited_for_longer_than_max_steps(tmp_path: Path) -> None:
    load = Load(persist_s=20.0, slowdown=0.0, stall_s=0.001, noise=0.01)
    world = World(tmp_path / "root", load, in_flight=20)
    policy = watching(world, max_steps=30)
    world.run(policy, range(1, 4000))
    saves = [step for step in world.saves if step > 1000]
    assert max(end - begin for begin, end in pairwise(saves)) == 30


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("most", [1, 2, 3, 10])
@pytest.mark.parametrize("persist_s", [0.05, 0.4, 30.0])
def test_max_steps_bounds_every_gap_from_the_first_save_on(
    tmp_path: Path, persist_s: float, most: int, ranks: int
) -> None:
    load = Load(persist_s=persist_s, noise=0.02)
    world = World(tmp_path / "root", load, in_flight=400, world_size=ranks)
    policy = watching(world, max_steps=most)
    world.run(policy, range(1, 400))
    assert world.saves[0] == 9
    assert max(later - earlier for earlier, later in pairwise(world.saves)) <= most
    assert policy.interval is not None and policy.interval.steps <= most
    world.saves.clear()
    world.run(policy, range(200, 300))
    assert world.saves[0] <= 200 + most
    assert max(later - earlier for earlier, later in pairwise(world.saves)) <= most


@pytest.mark.parametrize("every", [2, 5, 7])
@pytest.mark.parametrize("persist_s", [0.05, 0.4, 30.0])
def test_max_steps_bounds_every_gap_beside_a_policy_that_leaves_nothing_to_measure(
    tmp_path: Path, persist_s: float, every: int
) -> None:
    world = World(tmp_path / "root", Load(persist_s=persist_s), in_flight=400)
    policy = watching(world, max_steps=3) | EveryNSteps(every)
    world.run(policy, range(1, 400))
    saves = [step for step in world.saves if step >= 9]
    assert max(later - earlier for earlier, later in pairwise(saves)) <= 3


def test_beside_a_policy_that_saves_often_what_saves_cost_is_found_out_all_the_same(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "root", Load(persist_s=0.05))
    auto = watching(world)
    world.run(auto | EveryNSteps(7), range(1, 400))
    assert auto.interval is not None


def test_without_an_engine_to_watch_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"policy\.watch\(checkpointer\)"):
        Auto().should_save(1)
    with pytest.raises(ConfigError, match="no Checkpointer"):
        Auto().watch("ckpts")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_overhead": 0}, "max_overhead=0"),
        ({"max_overhead": 1.5}, "max_overhead=1.5"),
        ({"max_overhead": True}, "max_overhead=True"),
        ({"mtbf": -1}, "mtbf=-1"),
        ({"min_steps": 0}, "min_steps=0"),
        ({"max_steps": 2.5}, "max_steps=2.5"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Auto(**arguments)
