"""Every committed step is, leaf by leaf, what a run without checkpoints had at the end of that iteration."""

from __future__ import annotations

import pytest

from ckpt_core import committed_steps, verify
from tests.integrations.horovod.cases import (
    DELAYED_BY_THREE,
    DELAYED_BY_TWO,
    MODES,
    all_lazy,
    torn,
)
from tests.integrations.horovod.comparing import torn_steps
from tests.integrations.horovod.launch import Outcome

EACH = {1: (1, 2, 3, 4, 5, 6), 2: (2, 4, 6)}


def check(outcome: Outcome, name: str, every: int) -> None:
    """All steps are there, whole and exact."""
    outcome.of(name)
    root = outcome.folder / f"{name}.root"
    assert committed_steps(root / "ckpts") == EACH[every]
    assert verify(root / "ckpts").ok
    assert torn_steps(root, outcome.ranks) == {}


@pytest.mark.parametrize("name", DELAYED_BY_TWO)
def test_each_step_of_two_ranks_is_exact_under_random_delays(
    saved_by_two: Outcome, name: str
) -> None:
    check(saved_by_two, name, DELAYED_BY_TWO[name].how["every"])


@pytest.mark.parametrize("name", DELAYED_BY_THREE)
def test_each_step_of_three_ranks_is_exact_under_random_delays(trio: Outcome, name: str) -> None:
    check(trio, name, DELAYED_BY_THREE[name].how["every"])


@pytest.mark.parametrize("name", all_lazy())
def test_each_step_is_exact_where_nothing_is_copied_at_once(
    saved_by_two: Outcome, name: str
) -> None:
    check(saved_by_two, name, 1)


@pytest.mark.parametrize("mode", MODES)
def test_steps_were_made_in_layers_while_snapshots_were_copied(
    saved_by_two: Outcome, mode: str
) -> None:
    for found in saved_by_two.of(f"AdamW-{mode}-0"):
        assert found["in_layers"] > (5 if mode == "in_step" else 1)
        assert found["warnings"] == []


@pytest.mark.parametrize("name", torn())
def test_without_the_barrier_the_same_comparison_finds_torn_steps(
    saved_by_two: Outcome, name: str
) -> None:
    saved_by_two.of(name)
    root = saved_by_two.folder / f"{name}.root"
    assert committed_steps(root / "ckpts") == EACH[2]
    assert torn_steps(root, 2)
