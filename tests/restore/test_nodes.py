"""One root for each node: only steps that every node holds whole count, and errors say who lost what."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckpt_core.errors import (
    CorruptCheckpoint,
    RestoreError,
)
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.restore import load, verify
from tests.restore.harness import assert_same, flip, restorer, zeros_like
from tests.restore.ranks import (
    Ranks,
    restored,
    write_ranks,
)
from tests.restore.test_together import STEPS, error_types, job, live, shard_of


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Two nodes of two ranks each, with three steps."""
    roots = [tmp_path / "a", tmp_path / "b"]
    for step in STEPS:
        for number, root in enumerate(roots):
            write_ranks(root, step, job(step, 4), members=[2 * number, 2 * number + 1])
    return roots


def together(nodes: list[Path]) -> Ranks:
    return Ranks([nodes[0], nodes[0], nodes[1], nodes[1]], nodes=[[0, 1], [2, 3]])


def step_of(root: Path, step: int) -> Path:
    return root / f"step-{step:012d}"


def test_each_node_restores_from_its_own_root(nodes: list[Path]) -> None:
    lives = live(4)
    outcomes = together(nodes).restore(lives)
    assert outcomes.steps() == [30] * 4
    for rank, one in enumerate(lives):
        assert_same(one["shared"]["weight"], job(30).state(0)["shared"]["weight"])
        assert restored(outcomes, rank).borrowed_from is None
        assert restored(outcomes, rank).world_size == 4
    assert outcomes.texts == []


def test_a_step_that_one_node_has_lost_is_passed_over_by_all(nodes: list[Path]) -> None:
    shutil.rmtree(step_of(nodes[1], 30))
    outcomes = together(nodes).restore(live(4))
    assert outcomes.steps() == [20] * 4
    assert all("ranks 2-3 do not have it" in text for text in outcomes.texts)
    # Only where it is, and only by who leads there.
    assert [witness.suspects for witness in outcomes.witnesses] == [[30], [], [], []]
    assert [step for step, _ in restored(outcomes, 3).skipped] == [30]


def test_a_step_that_is_corrupt_on_one_node_is_suspect_on_all(nodes: list[Path]) -> None:
    flip(shard_of(step_of(nodes[1], 30), 3), 9000)
    outcomes = together(nodes).restore(live(4))
    assert outcomes.steps() == [20] * 4
    assert [witness.suspects for witness in outcomes.witnesses] == [[30], [], [30], []]


def test_steps_of_one_number_from_different_saves_are_not_the_same_step(nodes: list[Path]) -> None:
    shutil.rmtree(step_of(nodes[1], 30))
    write_ranks(nodes[1], 30, job(31, 4, attempt="9999abcd"), members=[2, 3])
    outcomes = together(nodes).restore(live(4))
    assert outcomes.steps() == [20] * 4
    assert all("from different saves" in text for text in outcomes.texts)


def test_when_no_step_is_on_all_nodes_the_error_says_which_node_holds_what(
    nodes: list[Path],
) -> None:
    for step, root in ((10, nodes[0]), (20, nodes[1])):
        shutil.rmtree(step_of(root, step))
    flip(step_of(nodes[1], 30) / MANIFEST_NAME, 30)
    outcomes = together(nodes).restore(live(4))
    assert error_types(outcomes.results) == ["NotCommitted"] * 4
    text = str(outcomes.results[0])
    assert "node of rank 0 (ranks 0-1): holds 30, 20; lost 10" in text
    assert "node of rank 2 (ranks 2-3): holds 10; lost 30 (" in text
    assert "checksum" in text
    assert len({str(result) for result in outcomes.results}) == 1


def test_an_empty_node_beside_a_full_one_is_no_fresh_start(
    nodes: list[Path], tmp_path: Path
) -> None:
    outcomes = together([nodes[0], tmp_path / "fresh disk"]).restore(live(4))
    assert error_types(outcomes.results) == ["NotCommitted"] * 4
    assert "node of rank 2 (ranks 2-3): holds no step; lost 30, 20, 10" in str(outcomes.results[3])


def test_an_explicit_step_must_be_on_all_nodes(nodes: list[Path]) -> None:
    assert together(nodes).restore(live(4), step=20).steps() == [20] * 4
    shutil.rmtree(step_of(nodes[0], 20))
    outcomes = together(nodes).restore(live(4), step=20)
    assert error_types(outcomes.results) == ["NotCommitted"] * 4
    assert "step 20 is not held by every node" in str(outcomes.results[2])
    assert all(not witness.suspects for witness in outcomes.witnesses)


def test_a_rank_without_files_in_its_root_borrows_from_one_that_has(nodes: list[Path]) -> None:
    outcomes = Ranks([nodes[1]] * 3).restore(live(3))
    assert [restored(outcomes, rank).borrowed_from for rank in range(3)] == [2, 3, None]
    assert_same(load(nodes[1], rank=3)["shared"], job(30).state(0)["shared"])


def test_the_root_of_one_node_says_that_boxes_lie_elsewhere(tmp_path: Path) -> None:
    boxed = {"table": torch.randn(400, 30)}
    for number, root in enumerate((tmp_path / "a", tmp_path / "b")):
        write_ranks(root, 1, job(0, 4, boxed=boxed), members=[2 * number, 2 * number + 1])
    with pytest.raises(RestoreError, match=r"ranks 0, 1 of 4 wrote.*boxed\.table") as caught:
        load(tmp_path / "a")
    assert not isinstance(caught.value, CorruptCheckpoint)
    one = zeros_like(job(0, 4, boxed=boxed).state(0))
    with pytest.raises(RestoreError, match=r"boxed\.table"):
        restorer(tmp_path / "a").restore(one)
    assert not one["shared"]["weight"].any()
    (report,) = verify(tmp_path / "a").steps
    assert report.ok
    assert report.is_partial
    assert (report.ranks, report.world_size) == ((0, 1), 4)
    assert report.elsewhere == ("boxed.table",)
