"""Directories of files by several real processes: each adds its own, and all are committed as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import committed_directories, verify
from tests.crash.warm import Warm
from tests.multirank.crew import all_well
from tests.multirank.file_jobs import POINTER, check
from tests.multirank.kills import SIGKILL, died, killed

JOBS = "tests.multirank.file_jobs:"


def run(warm: Warm, name: str, world: int, *, nodes: list[str] | None = None, **more: Any) -> Any:
    return warm.call(
        "tests.multirank.crew:run_ranks",
        call=JOBS + name,
        world_size=world,
        nodes=nodes,
        arguments=more,
    )


def run_well(warm: Warm, name: str, world: int, **more: Any) -> list[Any]:
    return all_well(run(warm, name, world, **more))


def leftovers(root: Path) -> list[Path]:
    return list(root.glob(".inflight/*"))


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_adds_its_files_and_one_commit_publishes_all(
    warm: Warm, tmp_path: Path, world: int
) -> None:
    names = ["tag0", "tag1", "tag1"]
    outcomes = run_well(warm, "save_directories", world, root=str(tmp_path), directories=names)
    assert outcomes == [names] * world
    check(tmp_path, "tag0", list(range(world)), 0)
    check(tmp_path, "tag1", list(range(world)), 2)
    assert (tmp_path / POINTER).read_text() == "tag1"
    assert verify(tmp_path / "tag0").steps[0].ranks == tuple(range(world))
    assert not leftovers(tmp_path)


def test_each_node_has_the_files_of_its_ranks_and_a_pointer(warm: Warm, tmp_path: Path) -> None:
    names = ["tag0", "tag1"]
    nodes = ["a", "a", "b"]
    run_well(warm, "save_directories", 3, nodes=nodes, root=str(tmp_path), directories=names)
    for step, name in enumerate(names):
        check(tmp_path / "a", name, [0, 1], step)
        check(tmp_path / "b", name, [2], step)
    for node in "ab":
        assert (tmp_path / node / POINTER).read_text() == "tag1"


@pytest.mark.parametrize(
    ("victim", "again"),
    [(0, False), (0, True), (1, False), (2, False)],
    ids=["leader", "leader, again", "member", "member without files"],
)
def test_a_killed_rank_never_leaves_a_torn_directory(
    warm: Warm, tmp_path: Path, victim: int, again: bool
) -> None:
    deaths = 0
    for jobs in killed(warm, f"{JOBS}killed_at", tmp_path, victim=victim, again=again):
        for how, outcomes in jobs:
            _check_killed(how, outcomes)
            deaths += died(outcomes, victim)
    assert deaths > 1


def _check_killed(how: dict[str, Any], outcomes: list[dict[str, Any]]) -> None:
    """What the ranks said of the save, and what is there now."""
    victim, n = how["victim"], how["n"]
    name = "tag1" if how["again"] else "tag2"
    dead = died(outcomes, victim)
    told = set()
    for rank, outcome in enumerate(outcomes):
        if rank == victim and dead:
            continue
        assert not outcome["problem"] and not outcome["signal"], (n, rank, outcome)
        result = outcome["result"]["outcome"]
        told.add(result == name)
        assert result == name or (dead and f"rank {victim}" in result), (n, rank, result)
    _check_after(Path(how["root"]), n, committed=True in told, again=how["again"])


def test_a_member_that_dies_after_its_vote_is_needed_no_more(warm: Warm, tmp_path: Path) -> None:
    first, dead, third = run(warm, "dies_after_its_vote", 3, root=str(tmp_path), victim=1)
    assert dead["signal"] == SIGKILL
    assert [first["result"], third["result"]] == ["tag2", "tag2"], (first, third)
    check(tmp_path, "tag2", [0, 1, 2], 2)
    assert (tmp_path / POINTER).read_text() == "tag2"


def test_a_leader_that_dies_before_it_publishes_leaves_the_directory_before(
    warm: Warm, tmp_path: Path
) -> None:
    dead, *others = run(warm, "dies_after_its_vote", 3, root=str(tmp_path), victim=0)
    assert dead["signal"] == SIGKILL
    assert all("rank 0" in one["result"] for one in others), others
    check(tmp_path, "tag1", [0, 1, 2], 1)
    assert (tmp_path / POINTER).read_text() == "tag1"
    assert not (tmp_path / "tag2").exists()


def _check_after(root: Path, n: int, *, committed: bool, again: bool) -> None:
    pointed = (root / POINTER).read_text()
    if again:
        assert pointed == "tag1"
        steps = [2] if committed else [1, 2]
        assert any(_holds(root, "tag1", step) for step in steps), (n, committed)
        return
    check(root, "tag1", [0, 1, 2], 1)
    assert pointed in (("tag2",) if committed else ("tag1", "tag2")), (n, committed)
    if pointed == "tag2" or (root / "tag2").exists():
        check(root, "tag2", [0, 1, 2], 2)


def _holds(root: Path, directory: str, step: int) -> bool:
    try:
        check(root, directory, [0, 1, 2], step)
    except AssertionError:
        return False
    return True


def test_a_full_disk_of_one_rank_fails_the_save_on_all_and_the_next_one_works(
    warm: Warm, tmp_path: Path
) -> None:
    for rank, found in enumerate(run_well(warm, "full_disk", 2, root=str(tmp_path))):
        assert found[0] == found[2] == "tag"
        assert "No space left" in found[1], found
        assert rank == 1 or "rank 1" in found[1]
    check(tmp_path, "tag", [0, 1], 3)
    assert (tmp_path / POINTER).read_text() == "tag"


@pytest.mark.parametrize("form", ["step", "directory"])
def test_a_rank_that_opens_its_files_after_the_directory_is_gone_names_who_gave_it_up(
    warm: Warm, tmp_path: Path, form: str
) -> None:
    names = ("step-000000000001", "step-000000000003") if form == "step" else ("tag", "tag")
    root = tmp_path / "root"
    for rank, found in enumerate(run_well(warm, "opens_late", 2, root=str(root), form=form)):
        assert (found[0], found[2]) == names
        assert "No space left" in found[1], found
        assert rank == 0 or "rank 0" in found[1]
    assert not leftovers(root)


@pytest.mark.parametrize("lenient", [False, True], ids=["found by the file", "by the leader"])
def test_two_ranks_that_add_the_same_name_fail_on_every_rank_and_it_is_named(
    warm: Warm, tmp_path: Path, lenient: bool
) -> None:
    found = run_well(warm, "same_name", 3, root=str(tmp_path), lenient=lenient)
    for first, second in found:
        assert "each name is added by one rank" in first, found
        assert "mine.pt" in first and second == "tag2"
    assert not (tmp_path / "tag1").exists()
    assert (tmp_path / POINTER).read_text() == "tag2"


def test_ranks_that_mean_different_directories_fail_together(warm: Warm, tmp_path: Path) -> None:
    for first, second in run_well(warm, "other_directory", 2, root=str(tmp_path)):
        assert "rank 1" in first and "'tag1x'" in first and "'tag1'" in first
        assert second == "tag2"
    assert not list(tmp_path.glob("tag1*"))


def test_a_rank_that_gives_up_fails_the_save_for_all(warm: Warm, tmp_path: Path) -> None:
    first, second = run_well(warm, "gives_up", 2, root=str(tmp_path))
    assert second == ["KeyboardInterrupt", "ConfigError", "tag"]
    assert all("rank 1" in text for text in first[:2]), first
    assert first[2] == "tag"
    assert verify(tmp_path / "tag").ok


def test_an_error_that_a_rank_raises_to_its_caller_is_not_raised_again_on_the_others(
    warm: Warm, tmp_path: Path
) -> None:
    first, second = run_well(warm, "raises_and_gives_up", 2, root=str(tmp_path))
    assert "rank 1" in first[0] and "ValueError: of the caller" in first[0]
    assert second[0] == "ValueError"
    assert first[1] == second[1] == "tag"


def test_training_never_waits_for_the_commit_of_a_slow_rank(warm: Warm, tmp_path: Path) -> None:
    found = run_well(warm, "slow_rank", 2, root=str(tmp_path / "root"), gate=str(tmp_path / "gate"))
    # Rank 0 had staged two saves and could train on while the last rank had written nothing.
    assert found[0] == [True, True, False]
    assert (tmp_path / "root" / POINTER).read_text() == "tag2"


def test_directories_are_listed_newest_first_whichever_was_published_first(
    warm: Warm, tmp_path: Path
) -> None:
    found = run_well(warm, "publishes_the_second_first", 2, root=str(tmp_path))
    assert found == [["tag1", "tag2"]] * 2
    assert committed_directories(tmp_path) == ("tag2", "tag1")
    assert (tmp_path / POINTER).read_text() == "tag2"
