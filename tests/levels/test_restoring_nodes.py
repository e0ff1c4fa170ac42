"""Several ranks and several roots: all take the same step, whichever of them has to bring it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.restore import verify
from ckpt_core.store import committed_steps, step_path
from ckpt_core.system.files import Files
from tests.levels.restoring import Nodes, gather_roots, shard_in
from tests.restore.harness import assert_same, flip, zeros_like
from tests.restore.ranks import write_ranks
from tests.restore.test_together import job, live

PAIRS = [[0, 1], [2, 3]]


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two nodes of two ranks each, with steps 10 and 20, which the level has too."""
    found = [tmp_path / "a", tmp_path / "b"]
    for step in (10, 20):
        for root, members in zip(found, PAIRS, strict=True):
            write_ranks(root, step, job(step, 4), members=members)
        gather_roots(tmp_path / "level", found, step, job(step, 4))
    return found


@pytest.fixture
def level(tmp_path: Path) -> Path:
    return tmp_path / "level"


def pairs(roots: Sequence[Path]) -> list[Path]:
    return [roots[0], roots[0], roots[1], roots[1]]


def ranks_in(root: Path, step: int) -> list[int]:
    path = step_path(root, step) / MANIFEST_NAME
    return [row.rank for row in Manifest.decode(path.read_bytes(), path=path).ranks]


def assert_restored(lives: Sequence[Any], step: int, world: int = 4) -> None:
    for rank, one in enumerate(lives):
        assert_same(one["shared"]["weight"], job(step, world).state(0)["shared"]["weight"])
        assert_same(one["own"], job(step, world).state(rank)["own"])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_a_fresh_root_have_the_step_brought_once(
    tmp_path: Path, world: int
) -> None:
    root, level = tmp_path / "root", tmp_path / "level"
    write_ranks(level, 20, job(20, world))
    lives = live(world)
    outcomes = Nodes([root] * world, None, [level]).restore(lives)
    assert outcomes.steps() == [20] * world
    assert_restored(lives, 20, world)
    assert outcomes.texts == []
    assert [calls["restore.bring"] for calls in outcomes.calls] == [1] * world
    assert verify(root).ok


def test_roots_that_have_all_ask_for_no_bringing(roots: list[Path], level: Path) -> None:
    outcomes = Nodes(pairs(roots), PAIRS, [level]).restore(live(4))
    assert outcomes.steps() == [20] * 4
    assert not any(calls["restore.bring"] for calls in outcomes.calls)


def test_a_node_that_lost_its_disk_gets_the_files_of_its_ranks(
    roots: list[Path], level: Path
) -> None:
    shutil.rmtree(roots[1])
    lives = live(4)
    outcomes = Nodes(pairs(roots), PAIRS, [level]).restore(lives)
    assert outcomes.steps() == [20] * 4
    assert_restored(lives, 20)
    assert outcomes.texts == []
    assert ranks_in(roots[1], 20) == [2, 3]
    assert verify(roots[1]).ok and verify(roots[0]).ok
    assert committed_steps(roots[1]) == (20,)


def test_all_nodes_that_lost_their_disks_go_on_from_the_level(
    roots: list[Path], level: Path
) -> None:
    for root in roots:
        shutil.rmtree(root)
    lives = live(4)
    assert Nodes(pairs(roots), PAIRS, [level]).restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)
    assert [ranks_in(root, 20) for root in roots] == PAIRS


def test_four_nodes_of_one_rank_go_on_from_the_level(
    roots: list[Path], level: Path, tmp_path: Path
) -> None:
    # The step was saved by two nodes of two ranks: what each stored is no whole state for one rank.
    fresh = [tmp_path / f"fresh{rank}" for rank in range(4)]
    lives = live(4)
    nodes = Nodes(fresh, [[rank] for rank in range(4)], [level])
    assert nodes.restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)
    assert all(ranks_in(root, 20) == [0, 1, 2, 3] for root in fresh)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_number_of_ranks_goes_on_after_the_loss_of_all_roots(
    roots: list[Path], level: Path, tmp_path: Path, world: int
) -> None:
    fresh = [tmp_path / f"fresh{rank}" for rank in range(world)]
    lives = live(world)
    nodes = Nodes(fresh, [[rank] for rank in range(world)], [level])
    assert nodes.restore(lives).steps() == [20] * world
    for one in lives:
        assert_same(one["shared"]["weight"], job(20, 4).state(0)["shared"]["weight"])
    assert all(ranks_in(root, 20) == [0, 1, 2, 3] for root in fresh)


@pytest.mark.parametrize(
    ("order", "now", "there"),
    [("bbaa", PAIRS, [[0, 1, 2, 3]] * 2), ("aaab", [[0, 1, 2], [3]], [[0, 1, 2], [2, 3]])],
)
def test_ranks_that_are_on_other_nodes_now_take_their_own_and_leave_what_was_there(
    roots: list[Path], level: Path, order: str, now: list[list[int]], there: list[list[int]]
) -> None:
    lives = live(4)
    outcomes = Nodes([roots["ab".index(node)] for node in order], now, [level]).restore(lives)
    assert outcomes.steps() == [20] * 4
    assert_restored(lives, 20)
    assert len(outcomes.texts) == 4 and all("brought anew" in text for text in outcomes.texts)
    # The other node may not have its part elsewhere yet.
    assert [ranks_in(root, 20) for root in roots] == there


def test_ranks_whose_own_part_no_level_has_take_that_of_others_with_a_warning(
    roots: list[Path], tmp_path: Path
) -> None:
    disks = {0: [tmp_path / "disk-b"], 2: [tmp_path / "disk-a"]}
    for root, (disk,) in zip(roots[::-1], disks.values(), strict=True):
        shutil.copytree(root, disk)
    outcomes = Nodes(pairs(roots[::-1]), PAIRS, disks).restore(live(4))
    assert outcomes.steps() == [20] * 4
    assert sum("has none of its own for it here" in text for text in outcomes.texts) == 4
    assert [ranks_in(root, 20) for root in roots] == PAIRS


def test_a_step_that_one_node_has_damaged_is_brought_there_anew(
    roots: list[Path], level: Path
) -> None:
    flip(shard_in(roots[1], 20, 3), 9000)
    lives = live(4)
    outcomes = Nodes(pairs(roots), PAIRS, [level]).restore(lives)
    assert outcomes.steps() == [20] * 4
    assert_restored(lives, 20)
    assert all(
        "step 20 is brought anew" in text and "shard-00003" in text for text in outcomes.texts
    )
    assert len(outcomes.texts) == 4
    assert verify(roots[1]).ok


def test_damage_here_and_at_the_level_makes_all_nodes_take_the_older_step(
    roots: list[Path], level: Path
) -> None:
    flip(shard_in(roots[1], 20, 3), 9000)
    flip(shard_in(level, 20, 3), 9000)
    lives = live(4)
    outcomes = Nodes(pairs(roots), PAIRS, [level]).restore(lives)
    assert outcomes.steps() == [10] * 4
    assert_restored(lives, 10)
    assert sum("step 20 was not restored" in text for text in outcomes.texts) == 4


def test_a_bring_that_fails_on_one_node_is_heard_by_all(roots: list[Path], level: Path) -> None:
    shutil.rmtree(roots[1])
    flip(shard_in(level, 20, 2), 9000)
    lives = live(4)
    outcomes = Nodes(pairs(roots), PAIRS, [level]).restore(lives)
    assert outcomes.steps() == [10] * 4
    assert_restored(lives, 10)
    assert all("rank 2" in text and "shard-00002" in text for text in outcomes.texts)
    assert committed_steps(roots[1]) == (10,)


def test_strict_raises_on_all_ranks_when_the_only_copy_is_damaged(
    roots: list[Path], level: Path
) -> None:
    shutil.rmtree(roots[1])
    flip(shard_in(level, 20, 2), 9000)
    outcomes = Nodes(pairs(roots), PAIRS, [level]).restore(live(4), strict=True)
    assert [type(one) for one in outcomes.results] == [CorruptCheckpoint] * 4


def test_a_newer_step_of_the_level_counts_for_nodes_that_all_lack_it(
    roots: list[Path], level: Path
) -> None:
    for root in roots:
        shutil.rmtree(step_path(root, 20))
    lives = live(4)
    assert Nodes(pairs(roots), PAIRS, [level]).restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)
    assert [committed_steps(root) for root in roots] == [(10, 20)] * 2


def test_a_step_asked_for_is_brought_where_it_is_missing(roots: list[Path], level: Path) -> None:
    shutil.rmtree(step_path(roots[0], 10))
    lives = live(4)
    assert Nodes(pairs(roots), PAIRS, [level]).restore(lives, step=10).steps() == [10] * 4
    assert_restored(lives, 10)


def test_a_level_that_only_one_node_has_serves_that_node(roots: list[Path], level: Path) -> None:
    shutil.rmtree(step_path(roots[0], 20))
    lives = live(4)
    assert Nodes(pairs(roots), PAIRS, {0: [level]}).restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)


def test_saves_of_one_number_that_differ_between_nodes_are_settled_by_the_level(
    roots: list[Path], level: Path
) -> None:
    shutil.rmtree(step_path(roots[1], 20))
    write_ranks(roots[1], 20, job(21, 4, attempt="9999abcd"), members=[2, 3])
    lives = live(4)
    assert Nodes(pairs(roots), PAIRS, [level]).restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)


def test_when_no_step_is_common_the_error_says_what_levels_hold(
    roots: list[Path], level: Path
) -> None:
    for step in (10, 20):
        shutil.rmtree(step_path(roots[1], step))
    write_ranks(roots[1], 30, job(30, 4), members=[2, 3])
    outcomes = Nodes(pairs(roots), PAIRS, {0: [level]}).restore(
        [zeros_like(job(0, 4).state(0)) for _ in range(4)]
    )
    texts = {str(result) for result in outcomes.results}
    assert len(texts) == 1
    assert "further levels hold 20, 10" in texts.pop()


def test_fewer_ranks_on_a_root_that_has_only_a_part_get_the_whole_from_the_level(
    tmp_path: Path,
) -> None:
    roots, level = [tmp_path / "a", tmp_path / "b"], tmp_path / "level"
    boxed = {"matrix": torch.arange(4000.0).reshape(40, 100)}
    saved = job(20, 4, boxed=boxed)
    for root, members in zip(roots, PAIRS, strict=True):
        write_ranks(root, 20, saved, members=members)
    gather_roots(level, roots, 20, saved)
    lives = [zeros_like(saved.state(0)) for _ in range(2)]
    outcomes = Nodes([roots[0]] * 2, None, [level]).restore(lives)
    assert outcomes.steps() == [20] * 2
    assert all("brought anew from a further level" in text for text in outcomes.texts[:2])
    for one in lives:
        assert_same(one["boxed"], boxed)
    assert ranks_in(roots[0], 20) == [0, 1, 2, 3]


def test_fewer_ranks_on_a_root_that_has_only_a_part_are_told_so_without_a_level(
    tmp_path: Path,
) -> None:
    saved = job(20, 4, boxed={"matrix": torch.arange(4000.0).reshape(40, 100)})
    write_ranks(tmp_path / "a", 20, saved, members=[0, 1])
    lives = [zeros_like(saved.state(0)) for _ in range(2)]
    outcomes = Nodes([tmp_path / "a"] * 2, None, [tmp_path / "none"]).restore(lives)
    assert all("were written by other ranks" in str(result) for result in outcomes.results)


def test_fewer_ranks_take_the_older_step_where_the_whole_of_the_newest_is_damaged(
    tmp_path: Path,
) -> None:
    roots, level = only_parts(tmp_path, 10, 20)
    flip(shard_in(level, 20, 3), 9000)
    lives = [zeros_like(job(10, 4, boxed=boxed_of(10)).state(0)) for _ in range(2)]
    outcomes = Nodes([roots[0]] * 2, None, [level]).restore(lives)
    assert outcomes.steps() == [10] * 2
    assert all("shard-00003" in text for text in outcomes.texts if "20 was not restored" in text)
    for one in lives:
        assert_same(one["boxed"], boxed_of(10))


def test_fewer_ranks_are_told_why_the_whole_of_a_step_could_not_be_brought(tmp_path: Path) -> None:
    class NoSpace(Files):
        def free_bytes(self, path: Path) -> int:
            return 150

    roots, level = only_parts(tmp_path, 20)
    lives = [zeros_like(job(20, 4, boxed=boxed_of(20)).state(0)) for _ in range(2)]
    outcomes = Nodes([roots[0]] * 2, None, [level], files={0: NoSpace()}).restore(lives)
    for result in outcomes.results:
        assert "has 150 B free and bringing step 20" in str(result), result
    assert committed_steps(roots[0]) == (20,)


def test_fewer_ranks_are_told_what_to_do_where_a_level_has_no_more_than_the_root(
    tmp_path: Path,
) -> None:
    roots, _ = only_parts(tmp_path, 20)
    shutil.copytree(roots[0], tmp_path / "copy")
    lives = [zeros_like(job(20, 4, boxed=boxed_of(20)).state(0)) for _ in range(2)]
    outcomes = Nodes([roots[0]] * 2, None, [tmp_path / "copy"]).restore(lives)
    for result in outcomes.results:
        assert "copy holds only what ranks 0, 1 wrote of step 20" in str(result)
        assert "restore on the nodes and with the number of ranks that saved it" in str(result)


def only_parts(tmp_path: Path, *steps: int) -> tuple[list[Path], Path]:
    """Two nodes that each have a part of what every rank needs of a step, and a level with all."""
    roots, level = [tmp_path / "a", tmp_path / "b"], tmp_path / "level"
    for step in steps:
        saved = job(step, 4, boxed=boxed_of(step))
        for root, members in zip(roots, PAIRS, strict=True):
            write_ranks(root, step, saved, members=members)
        gather_roots(level, roots, step, saved)
    return roots, level


def boxed_of(step: int) -> dict[str, torch.Tensor]:
    return {"matrix": torch.arange(4000.0).reshape(40, 100) + step}


def test_a_level_on_a_disk_of_each_node_gives_a_node_its_part_back(
    roots: list[Path], tmp_path: Path
) -> None:
    disks = {0: [tmp_path / "disk-a"], 2: [tmp_path / "disk-b"]}
    for root, (disk,) in zip(roots, disks.values(), strict=True):
        root.rename(disk)
    lives = live(4)
    assert Nodes(pairs(roots), PAIRS, disks).restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)
    assert [ranks_in(root, 20) for root in roots] == PAIRS


def test_a_level_that_holds_the_part_of_another_node_is_passed_by(
    roots: list[Path], level: Path, tmp_path: Path
) -> None:
    roots[0].rename(tmp_path / "disk")
    shutil.rmtree(roots[1])
    lives = live(4)
    nodes = Nodes(pairs(roots), PAIRS, [tmp_path / "disk", level])
    assert nodes.restore(lives).steps() == [20] * 4
    assert_restored(lives, 20)
    assert [ranks_in(root, 20) for root in roots] == PAIRS


@pytest.mark.parametrize("made_unix_s", [0.5, 1.5])
def test_all_ranks_take_a_save_that_all_can_have_where_one_node_can_have_another_one_too(
    made_unix_s: float, roots: list[Path], level: Path, tmp_path: Path
) -> None:
    # What the first node's disk has of step 20 is of another save, later by its clock or not.
    roots[0].rename(tmp_path / "disk-a")
    shutil.rmtree(roots[1])
    path = step_path(tmp_path / "disk-a", 20) / MANIFEST_NAME
    found = Manifest.decode(path.read_bytes(), path=path)
    attempt = found.attempt[:-8] + "99999999"
    path.write_bytes(replace(found, attempt=attempt, created_unix_s=made_unix_s).encode())
    disks = {0: [tmp_path / "disk-a", level], 2: [tmp_path / "disk-b", level]}
    lives = live(4)
    outcomes = Nodes(pairs(roots), PAIRS, disks).restore(lives)
    assert outcomes.steps() == [20] * 4
    assert_restored(lives, 20)
    assert len(outcomes.texts) == 4 and all("2 different saves" in one for one in outcomes.texts)


def test_fewer_ranks_take_the_whole_where_the_nearest_level_has_a_part(tmp_path: Path) -> None:
    roots, level = [tmp_path / "a", tmp_path / "b"], tmp_path / "level"
    saved = job(20, 4, boxed={"matrix": torch.arange(4000.0).reshape(40, 100)})
    for root, members in zip(roots, PAIRS, strict=True):
        write_ranks(root, 20, saved, members=members)
    gather_roots(level, roots, 20, saved)
    lives = [zeros_like(saved.state(0)) for _ in range(2)]
    outcomes = Nodes([tmp_path / "fresh"] * 2, None, [roots[0], level]).restore(lives)
    assert outcomes.steps() == [20] * 2
    assert_same(lives[1]["boxed"], saved.boxed)


def test_ranks_wait_for_a_step_that_takes_longer_to_bring_than_any_read_may(
    roots: list[Path], level: Path
) -> None:
    class Slow(Files):
        def create(self, path: Path, *, direct: bool = False) -> int:
            time.sleep(7.0 if "shard-00002" in path.name else 0.0)
            return super().create(path, direct=direct)

    shutil.rmtree(roots[1])
    nodes = Nodes(pairs(roots), PAIRS, [level], files={2: Slow()}, timeout_s=3.0)
    assert nodes.restore(live(4)).steps() == [20] * 4
