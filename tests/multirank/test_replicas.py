"""What is stored as slices of several ranks is equal on all of them, or the save fails with rank and leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import verify
from tests.crash.warm import Warm
from tests.multirank.crew import all_well


def run(warm: Warm, name: str, world: int, *, nodes: list[str] | None = None, **more: Any) -> Any:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call=f"tests.multirank.replica_jobs:{name}",
        world_size=world,
        nodes=nodes,
        arguments=more,
    )
    return all_well(outcomes)


def drifted(warm: Warm, root: Path, world: int, **more: Any) -> list[list[str]]:
    given = {"odd": [world - 1], "since": 2, "saves": 2, "layers": False, "how": "all"} | more
    found: list[list[str]] = run(warm, "drift", world, root=str(root), **given)
    return found


def named(outcomes: list[list[str]], rank: int, leaf: str) -> bool:
    return all(
        said[-1].startswith("CommitError") and f"rank {rank}" in said[-1] and repr(leaf) in said[-1]
        for said in outcomes
    )


@pytest.mark.parametrize("layers", [False, True], ids=["save", "layer-wise"])
@pytest.mark.parametrize(
    ("path", "how"),
    [
        ("large", "all"),
        ("large", "second half"),
        ("brief", "second half"),
        ("strided", "second half"),
        ("nan", "sign of nan"),
        ("small.3", "all"),
    ],
)
def test_a_leaf_that_was_equal_and_is_not_any_more_fails_the_next_save(
    warm: Warm, tmp_path: Path, path: str, how: str, layers: bool
) -> None:
    found = drifted(warm, tmp_path, 2, path=path, how=how, layers=layers)
    assert all(len(said) == 2 and said[0].startswith("step-") for said in found), found
    assert named(found, 1, path), found
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000000010"]


def test_a_leaf_that_differs_behind_its_first_bytes_fails_the_first_save(
    warm: Warm, tmp_path: Path
) -> None:
    found = drifted(warm, tmp_path, 2, path="large", how="second half", since=1)
    assert all(len(said) == 1 for said in found)
    assert named(found, 1, "large"), found


def test_one_element_that_stays_different_is_found_within_a_round(
    warm: Warm, tmp_path: Path
) -> None:
    # 4 MiB on 2 ranks, of which 256 KiB are looked at: a round is 16 saves, and some bytes for the others.
    found = drifted(warm, tmp_path, 2, path="large", how="one element", since=3, saves=24)
    assert all(len(said) <= 2 + 20 for said in found), found
    assert named(found, 1, "large"), found


@pytest.mark.parametrize(("world", "odd"), [(3, 0), (3, 1), (4, 2)])
def test_the_rank_that_differs_from_most_is_named(
    warm: Warm, tmp_path: Path, world: int, odd: int
) -> None:
    found = drifted(warm, tmp_path, world, path="large", odd=[odd])
    right = 1 if odd == 0 else 0
    assert named(found, odd, "large"), found
    for said in found:
        assert f"rank {odd}: ConfigError: differs from rank {right}" in said[-1]


def test_nodes_with_roots_of_their_own_are_compared_too(warm: Warm, tmp_path: Path) -> None:
    found = drifted(warm, tmp_path, 2, nodes=["a", "b"], path="brief")
    assert named(found, 1, "brief"), found
    assert not list(tmp_path.glob("*/step-*20"))


@pytest.mark.parametrize("layers", [False, True], ids=["save", "layer-wise"])
def test_equal_leaves_pass_while_training_changes_them_as_soon_as_it_may(
    warm: Warm, tmp_path: Path, layers: bool
) -> None:
    for said in run(warm, "equal_while_training", 3, root=str(tmp_path), layers=layers):
        assert len(said) == 12 and all(one.startswith("step-") for one in said)
    assert verify(tmp_path).ok


def test_a_rank_that_sat_out_a_save_is_compared_again_and_so_is_a_resumed_job(
    warm: Warm, tmp_path: Path
) -> None:
    first, second = run(warm, "skips_one", 2, root=str(tmp_path))
    for life in range(2):
        said = first[7 * life : 7 * life + 7]
        assert [one.startswith("step-") for one in said] == [True] * 2 + [False] + [True] * 3 + [
            False
        ]
        assert "rank 1" in said[2] and "'large'" in said[6], said
    assert len(second) == 12


@pytest.mark.parametrize("how", ["stays", "drifts"])
def test_boxes_of_distributed_tensors_are_compared_among_their_replicas(
    warm: Warm, tmp_path: Path, how: str
) -> None:
    found = run(warm, "mesh", 4, root=str(tmp_path), how=how)
    assert all(one.startswith("step-") for said in found for one in said[:2]), found
    if how == "stays":
        assert all(said[2].startswith("step-") for said in found), found
    else:
        assert named(found, 3, "split"), found


@pytest.mark.parametrize("how", ["stays", "drifts"])
def test_boxes_of_meshes_that_know_nothing_of_each_other_are_compared(
    warm: Warm, tmp_path: Path, how: str
) -> None:
    found = run(warm, "meshes", 4, root=str(tmp_path), how=how)
    assert all(one.startswith("step-") for said in found for one in said[:2]), found
    last = "step-" if how == "stays" else "CommitError"
    assert all(said[2].startswith(last) for said in found), found
