"""With checkpoints, training has the bits that it has with Horovod's own optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.horovod.cases import CASES, MODES, OF_THREE
from tests.integrations.horovod.launch import Outcome

SAVED = [2, 4, 6]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_with_horovod_alone(bits_of_two: Outcome, name: str, mode: str) -> None:
    for found in bits_of_two.of(f"bits-{name}"):
        check(found["stock"], found[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OF_THREE)
def test_three_ranks_train_as_with_horovod_alone(trio: Outcome, name: str, mode: str) -> None:
    for rank, found in enumerate(trio.of(f"bits-{name}")):
        if rank in CASES[name].recipe.get("ranks", range(3)):
            check(found["stock"], found[mode])
        else:
            assert found["stock"] == found[mode]["digests"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_made_in_layers_where_they_may_be(
    bits_of_two: Outcome, name: str, mode: str
) -> None:
    case = CASES[name]
    for found in bits_of_two.of(f"bits-{name}"):
        # Two steps began while a snapshot was being copied; in_step splits the three that are saved, too.
        assert found[mode]["held_up"] == 2 or name == "scaler-inf"
        expected = 0 if not case.splits else 2 + 3 * (mode == "in_step" and case.reduces)
        if name == "scaler-inf":
            expected = 1  # the step after the first save is skipped
        assert found[mode]["in_layers"] == expected
        assert (found[mode]["parts"] > 0) == (expected > 0)


def check(stock: list[str], found: dict[str, Any]) -> None:
    """The same after each iteration, and all that was due is committed."""
    assert found["steps"] == SAVED
    assert found["digests"] == stock
    assert len(set(stock)) == len(stock)
