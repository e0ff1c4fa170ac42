"""When to save, asked step by step as a training loop asks."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError
from ckpt_core.policy import Auto, EveryNSteps, EverySeconds, LastStep, Policy
from tests.policy.world import World


class Clock:
    """A clock that the test winds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def saves(policy: Policy, steps: range | list[int]) -> list[int]:
    return [step for step in steps if policy.should_save(step)]


def test_every_n_steps_saves_at_multiples_and_not_at_step_0() -> None:
    assert saves(EveryNSteps(100), range(350)) == [100, 200, 300]


def test_every_step_is_saved_with_an_interval_of_1() -> None:
    assert saves(EveryNSteps(1), range(4)) == [1, 2, 3]


@pytest.mark.parametrize("first", [901, 950, 1000])
def test_a_resumed_run_saves_where_the_run_before_would_have(first: int) -> None:
    assert saves(EveryNSteps(100), range(first, 1201)) == [1000, 1100, 1200]


def test_a_multiple_that_is_jumped_over_is_made_up_for_once() -> None:
    assert saves(EveryNSteps(100), [0, 90, 350, 351, 399, 400, 401]) == [350, 400]


def test_a_step_is_saved_once_when_it_is_asked_about_twice() -> None:
    assert saves(EveryNSteps(10), [10, 10, 11, 20]) == [10, 20]


def test_the_interval_starts_anew_when_training_goes_back() -> None:
    assert saves(EveryNSteps(10), [19, 20, 21, 5, 9, 10, 11, 20]) == [20, 10, 20]


@given(n=st.integers(1, 50), jumps=st.lists(st.integers(1, 120), max_size=60))
def test_no_interval_holds_two_saves_and_none_goes_without(n: int, jumps: list[int]) -> None:
    policy, step, saved = EveryNSteps(n), 0, []
    policy.should_save(0)
    for jump in jumps:
        before, step = step, step + jump
        wanted = policy.should_save(step)
        assert wanted == (step // n > before // n)
        saved += [step] if wanted else []
    assert len({step // n for step in saved}) == len(saved)


def test_every_seconds_counts_from_the_first_question() -> None:
    clock = Clock()
    policy = EverySeconds(timedelta(minutes=1), clock=clock)
    clock.now_s += 1e6
    assert not policy.should_save(0)
    clock.now_s += 59.5
    assert not policy.should_save(1)
    clock.now_s += 0.5
    assert policy.should_save(2)
    assert not policy.should_save(3)
    clock.now_s += 61
    assert policy.should_save(4)


def test_of_several_ranks_the_first_ones_clock_counts_and_is_seldom_asked(tmp_path: Path) -> None:
    asked = 0

    class Told(World):
        def of_first_rank(self, topic: str, value: Any) -> Any:
            nonlocal asked
            asked += 1
            return value

    world = Told(tmp_path / "root", world_size=2)
    policy = EverySeconds(60, clock=world.clock)
    policy.watch(world)
    world.run(policy, range(1, 5000))
    # Iterations of 0.1 s, and 0.12 to 0.15 s while a save is under way.
    gaps = [later - earlier for earlier, later in pairwise(world.saves)]
    assert len(gaps) >= 7 and min(gaps) >= 590 and max(gaps) <= 601
    assert asked <= 15 * len(world.saves)


def test_either_policy_may_want_a_save_and_it_counts_for_both() -> None:
    clock = Clock()
    policy = EveryNSteps(100) | EverySeconds(60, clock=clock)
    assert not policy.should_save(1)
    clock.now_s += 60
    assert policy.should_save(50)
    clock.now_s += 30
    assert policy.should_save(100)
    clock.now_s += 59
    assert not policy.should_save(150)
    clock.now_s += 1
    assert policy.should_save(151)


def test_both_policies_must_want_a_save_and_a_wish_lasts() -> None:
    clock = Clock()
    policy = EveryNSteps(100) & EverySeconds(60, clock=clock)
    assert not policy.should_save(99)
    assert not policy.should_save(100)
    clock.now_s += 60
    assert policy.should_save(130)
    clock.now_s += 60
    assert not policy.should_save(199)
    assert policy.should_save(200)


def test_combinations_nest_and_say_what_they_are() -> None:
    policy = EveryNSteps(10) | (EveryNSteps(3) & EverySeconds(1.5))
    assert repr(policy) == "(EveryNSteps(10) | (EveryNSteps(3) & EverySeconds(1.5)))"


def test_the_default_clock_is_real() -> None:
    policy = EverySeconds(timedelta(microseconds=1))
    assert not EverySeconds(3600).should_save(0)
    policy.should_save(0)
    time.sleep(0.001)
    assert policy.should_save(1)


@pytest.mark.parametrize("n_steps", [0, -1, 2.5, "3", True, None])
def test_a_bad_interval_is_refused(n_steps: object) -> None:
    with pytest.raises(ConfigError, match="n_steps="):
        EveryNSteps(n_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("duration", [0, -1.0, "1m", float("nan"), timedelta(0)])
def test_a_bad_duration_is_refused(duration: object) -> None:
    with pytest.raises(ConfigError, match="duration="):
        EverySeconds(duration)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.5, None, True])
def test_a_bad_step_is_refused(step: object) -> None:
    with pytest.raises(ConfigError, match="step="):
        EveryNSteps(3).should_save(step)  # type: ignore[arg-type]


def test_only_policies_combine() -> None:
    with pytest.raises(TypeError):
        EveryNSteps(3) | 4
    with pytest.raises(TypeError):
        EveryNSteps(3) & None


def test_the_last_step_of_a_run_is_saved_once_whatever_the_interval() -> None:
    policy = EveryNSteps(100) | LastStep(250)
    assert [step for step in range(1, 260) if policy.should_save(step)] == [100, 200, 250]
    assert repr(policy) == "(EveryNSteps(100) | LastStep(250))"
    # Asked anew from a lower step, as after a restore, it is due again.
    assert not policy.should_save(240)
    assert policy.should_save(250)
    for wrong in (-1, 2.5, True):
        with pytest.raises(ConfigError):
            LastStep(wrong)  # type: ignore[arg-type]


class WhenAsked(Policy):
    """One that a user has written."""

    watched: object = None

    def __repr__(self) -> str:
        return "WhenAsked()"

    def watch(self, checkpointer: Any, *, agree: bool = True) -> None:
        self.watched = checkpointer

    def due(self, step: int) -> bool:
        return False

    def saved(self, step: int) -> None:
        pass


AUTO = Auto(cache=False)


@pytest.mark.parametrize(
    ("policy", "every", "warns"),
    [
        (AUTO, 50, True),
        (AUTO, 1, False),
        (AUTO | LastStep(250), 50, True),
        (LastStep(250) | (EverySeconds(60) | AUTO), 50, True),
        (EveryNSteps(50) & AUTO, 50, True),
        (EveryNSteps(100) | (LastStep(250) | AUTO), 50, False),
        (EveryNSteps(70) | LastStep(250), 50, False),
        (AUTO | WhenAsked(), 50, True),
        (EverySeconds(60), 50, True),
        (LastStep(250) | EverySeconds(60), 50, True),
        (EveryNSteps(50) | EverySeconds(60), 50, False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_level_that_gets_hardly_a_step_of_auto_is_told_at_once_and_once(
    policy: Policy,
    every: int,
    warns: bool,
    rank: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    levels = {"/near": 1, "s3://bucket/far": every}
    policy.watch(World(tmp_path / "root", rank=rank, world_size=2, every=levels))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (warns and rank == 0)
    for text in told:
        assert "s3://bucket/far" in text and f"every={every}" in text and repr(policy) in text


def test_a_policy_of_ones_own_watches_in_a_combination_too(tmp_path: Path) -> None:
    mine = WhenAsked()
    world = World(tmp_path / "root")
    (mine | EveryNSteps(2) | LastStep(9)).watch(world)
    assert mine.watched is world
