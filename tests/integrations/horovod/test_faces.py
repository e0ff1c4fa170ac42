"""To everybody else the wrapped optimizer is Horovod's; and the ranks share the writing."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_core import step_path, verify
from ckpt_core.restore import read_manifests
from ckpt_core.system.files import Files
from tests.integrations.horovod.cases import MODES
from tests.integrations.horovod.launch import Outcome


def test_it_is_an_optimizer_of_horovod_and_of_the_users_class(pair: Outcome) -> None:
    for found in pair.of("what_it_is"):
        assert found["is AdamW"]
        assert found["is Optimizer"]
        assert found["bases"]
        assert found["names"] == ["AdamW", "AdamW"]
        # By this name Horovod's broadcast_optimizer_state knows its own.
        assert found["modules"] == ["horovod.torch.optimizer"] * 2
        assert found["missing"] == []
        assert found["defaults"]


def test_state_dicts_go_to_horovods_own_and_back(pair: Outcome) -> None:
    for found in pair.of("state_dicts"):
        assert found == {"there": True, "back": True, "on": True}


def test_broadcasts_of_horovod_do_what_they_do_with_its_own(pair: Outcome) -> None:
    first, second = pair.of("broadcasts")
    for found in (first, second):
        assert found["ours"] == found["stock"]
        assert found["ours lr"] == found["stock lr"]
    assert first["ours"] == second["ours"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_may_be_made_before_or_after_wrapping(pair: Outcome, when: str) -> None:
    for found in pair.of("schedulers"):
        assert found[f"ours {when}"] == found[f"stock {when}"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_goes_on_after_a_restore(pair: Outcome, when: str) -> None:
    for found in pair.of("schedulers"):
        assert found[f"again {when}"]


def test_state_of_an_optimizer_that_was_used_survives_wrapping(pair: Outcome) -> None:
    for found in pair.of("used_before"):
        assert found == {"kept": True, "entries": 2}


ERRORS = ("duplicate names", "unnamed", "not pairs", "passes", "groups", "zero_grad", "early")


@pytest.mark.parametrize("name", ERRORS)
def test_horovods_errors_come_through_unchanged(pair: Outcome, name: str) -> None:
    for found in pair.of("errors"):
        ours, stock = found[name]
        assert ours == stock != ""


def test_steps_wait_for_leaves_by_the_names_that_are_saved(pair: Outcome) -> None:
    """A name that no save knows would be waited for as all leaves."""
    found: Any = read_manifests(step_path(pair.folder / "names.root", 1), files=Files())
    saved = {entry.spec.name for rank in found.ranks for entry in (*rank.leaves, *rank.slices)}
    for names in pair.of("names"):
        assert len(set(names)) == len(names) == 12 + 3 * 10  # two parameters are frozen
        assert set(names) <= saved


def written(outcome: Outcome, name: str, step: int) -> list[int]:
    """Bytes in the shard files of each rank, by the manifests."""
    path = step_path(outcome.folder / f"{name}.root", step)
    found: Any = read_manifests(path, files=Files())
    assert [rank.rank for rank in found.ranks] == list(range(outcome.ranks))
    return [sum(file.nbytes for file in rank.files) for rank in found.ranks]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [1, 2])
def test_each_of_two_ranks_writes_half(pair: Outcome, mode: str, step: int) -> None:
    pair.of(f"large-{mode}")
    share(written(pair, f"large-{mode}", step))


def test_each_of_three_ranks_writes_a_third(trio: Outcome) -> None:
    trio.of("large-lazy")
    share(written(trio, "large-lazy", 2))


def test_the_frozen_layer_is_written_once_by_each_rank(pair: Outcome) -> None:
    for found in pair.of("shared"):
        assert found["steps"] == [1, 2, 3, 4, 5, 6] and found["same"]
    root = pair.folder / "shared.root"
    assert verify(root).ok
    for rank in (0, 1):
        files = [*step_path(root, 6).glob(f"shard-{rank:05d}-*")]
        # Three steps to see that the layer stays, and one that writes it apart.
        (still,) = [path.stat() for path in files if path.stat().st_nlink == 3]
        assert still.st_size > 300 * 300 * 4 / 2, "half of its weight"


def share(sizes: list[int]) -> None:
    """Equal shares, 1 % allowed: each has its own random numbers, and the first one the buffers."""
    total = sum(sizes)
    assert total > 4_000_000
    for size in sizes:
        assert abs(size - total / len(sizes)) < 0.01 * total / len(sizes)
