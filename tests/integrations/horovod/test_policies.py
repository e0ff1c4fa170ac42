"""Which iterations are saved: the same on all ranks, whatever their clocks say."""

from __future__ import annotations

import pytest

from tests.integrations.horovod.cases import MODES
from tests.integrations.horovod.launch import Outcome

FIRST = [step for step in range(1, 9) if (step * 7) % 5 < 2]
"""What the first rank answers; the second would say something else."""


@pytest.mark.parametrize("name", [*MODES, *(f"hook-{mode}" for mode in MODES)])
def test_a_policy_that_differs_is_asked_on_the_first_rank_alone(pair: Outcome, name: str) -> None:
    first, second = pair.of(f"told-{name}")
    assert first["made"] == second["made"] == FIRST
    assert [step for step, _ in first["asked"]] == list(range(1, 10))
    assert second["asked"] == []


def test_a_policy_that_measures_sees_the_engine_and_saves_alike(pair: Outcome) -> None:
    first, second = pair.of("measured")
    assert first["made"] and first["made"] == second["made"]
    assert set(first["steps"]) == set(second["steps"]) <= set(first["made"])


def test_ranks_of_a_process_set_agree_and_the_others_save_nothing(trio: Outcome) -> None:
    first, outsider, second = trio.of("told-members")
    assert first["made"] == second["made"] == FIRST
    assert outsider["made"] == []


def test_a_rank_outside_of_the_process_set_is_told_to_give_no_checkpointer(trio: Outcome) -> None:
    first, outsider, second = trio.of("outside")
    assert first == second == []
    assert len(outsider) == 2, "with the others, and alone"
    for problem in outsider:
        assert "rank 1 is not in it" in problem
        assert problem.endswith("give its optimizer checkpointer=None")


def test_two_optimizers_whose_parameters_have_the_same_names_are_told_apart(pair: Outcome) -> None:
    assert pair.of("two_told") == [[FIRST, FIRST]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_that_save_by_one_checkpointer_are_told_and_one_made_anew_is_not(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"one_root-{mode}"):
        assert len(found["problems"]) == 3, (
            "the second one twice, and the first when a third has come"
        )
        assert all("attach the others" in problem for problem in found["problems"])
        assert found["steps"] == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_goes_on_from_what_another_has_saved_replaces_nothing_and_is_not_refused(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"phases-{mode}"):
        assert found["steps"] == [1, 2, 3, 4, 5]
        assert len(found["problems"]) == 1, "the first, before it has restored too"


def test_an_optimizer_that_one_rank_alone_has_made_and_never_steps_is_no_ones_business(
    pair: Outcome,
) -> None:
    assert pair.of("one_more") == [3, 3]


def test_a_rank_ends_its_last_iteration_after_another_has_left(pair: Outcome) -> None:
    assert pair.of("left_early") == [3, 3]


def test_two_steps_in_one_iteration_are_one_question(pair: Outcome) -> None:
    first, second = pair.of("twice")
    assert [step for step, _ in first["asked"]] == list(range(1, 10))
    assert first["steps"] == second["steps"] == FIRST


def test_ranks_agree_after_training_went_back(pair: Outcome) -> None:
    first, second = pair.of("told_again")
    assert first == second
    assert [number for number, _ in first["made"]] == [1, 2, 3, 2, 3, 4]
    assert {number for number, made in first["made"] if made} == set(first["steps"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["fixed", "told"])
def test_an_iteration_that_failed_and_is_made_again_is_saved_as_it_was_to_be(
    pair: Outcome, policy: str, mode: str
) -> None:
    assert pair.of(f"made_again-{policy}-{mode}") == [[1, 2, 3, 4]] * 2


def test_without_a_policy_saved_is_what_is_asked_for(pair: Outcome) -> None:
    for found in pair.of("asked_for"):
        assert found == {"steps": [3], "handles": [False, False, True, False]}


@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_that_is_not_to_be_saved_is_not(pair: Outcome, mode: str) -> None:
    for found in pair.of(f"unwanted-{mode}"):
        assert found == {"steps": [1, 4]}


def test_parts_of_an_iteration_come_back_and_private_ones_to_their_rank(pair: Outcome) -> None:
    for rank, found in enumerate(pair.of("parts")):
        assert found == {"losses": [1, 0.5], "step": 2, "mine": [float(rank)] * 3}


REFUSALS = {
    "both": "every_n_steps= and policy= exclude each other",
    "no policy": "policy=3 has no should_save",
    "zero": "every_n_steps=0 must be an int above 0",
    "layerwise": "layerwise='eager' is unknown: use 'in_step' or 'lazy'",
    "no checkpointer": "must be a ckpt_core.Checkpointer",
    "alone": "coordination=ckpt_horovod.coordination()",
    "taken": "optimizer=: this name is taken",
    "taken once": "optimizer=: this name is taken",
    "nested": "not to be nested",
    "inside": "the block ends by itself",
    "restore": "checkpointer=None",
    "roots": "roots='here' is unknown",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_refused_in_words(pair: Outcome, name: str) -> None:
    for found in pair.of("refused"):
        assert REFUSALS[name] in found[name]


def test_an_optimizer_that_was_vouched_for_in_vain_is_found_out(pair: Outcome) -> None:
    for found in pair.of("vouched"):
        assert "pass separable=False" in found["problem"]
        assert found["ended"] == 0
