"""A disk that fails on one rank is told at the end of a later iteration; training is never touched."""

from __future__ import annotations

import pytest

from ckpt_core import committed_steps, verify
from tests.integrations.horovod.cases import FAILURES
from tests.integrations.horovod.launch import Outcome

RAISING = [name for name in FAILURES if name.startswith("raise")]


@pytest.mark.parametrize("name", FAILURES)
def test_training_has_the_bits_of_horovod_alone(pair: Outcome, name: str) -> None:
    for rank, found in enumerate(pair.of(f"failing-{name}")):
        assert found["found"] == found["stock"]
        assert (found["struck"] > 0) == (rank == 1)
        assert (found["in_layers"] > 0) or "lazy" in name


@pytest.mark.parametrize("name", RAISING)
def test_it_is_raised_on_both_ranks_where_an_iteration_ends(pair: Outcome, name: str) -> None:
    where = FAILURES[name]["ends"].replace("call", "end")
    for found in pair.of(f"failing-{name}"):
        assert found["raised"]
        assert {place for _, place, _ in found["raised"]} == {where}
        # What was saved in the third iteration failed, and the end of the next one says so.
        assert min(number for number, *_ in found["raised"]) == 3


@pytest.mark.parametrize("name", [name for name in FAILURES if name not in RAISING])
def test_nothing_is_raised_where_warnings_are_asked_for(pair: Outcome, name: str) -> None:
    for found in pair.of(f"failing-{name}"):
        assert found["raised"] == []


@pytest.mark.parametrize("name", FAILURES)
def test_saving_goes_on_once_the_disk_is_mended(pair: Outcome, name: str) -> None:
    pair.of(f"failing-{name}")
    root = pair.folder / f"failing-{name}.root"
    assert verify(root).ok
    steps = committed_steps(root)
    assert 8 in steps
    lost = {3} if FAILURES[name]["ends"] == "call" else {2}
    assert lost.isdisjoint(steps)


def test_a_parameter_that_one_rank_alone_touched_costs_that_step_and_no_other(
    pair: Outcome,
) -> None:
    for found in pair.of("edited"):
        assert found["ended"] == [1, 2, 3, 4, 5]
        assert found["steps"] == [1, 3, 4, 5]
