"""Further levels of nodes that have disks of their own: a disk that is lost, and all that is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.layout import Manifest
from ckpt_core.levels import LEVELS
from ckpt_core.store import committed_steps, step_path, writer_of
from tests.crash.warm import Warm
from tests.levels.trainers import end_agent, until
from tests.multirank.crew import all_well

NODES = ["a", "b"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for node in NODES:
        if (tmp_path / node / LEVELS).is_dir():
            end_agent(tmp_path / node)


def ranks(
    warm: Warm, name: str, place: Path, *, nodes: list[str] = NODES, **more: Any
) -> list[Any]:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call=f"tests.multirank.node_disk_jobs:{name}",
        world_size=len(nodes),
        nodes=nodes,
        arguments={"root": str(place), **more},
    )
    found = all_well(outcomes)
    for node in nodes:
        until(lambda node=node: writer_of(place / node / LEVELS) is None, "the end of the agent")
    return found


def disk(place: Path, node: str) -> Path:
    return place / f"machine-{node}" / "disk"


def ranks_in(root: Path, step: int) -> list[int]:
    path = step_path(root, step) / "manifest.json"
    return [row.rank for row in Manifest.decode(path.read_bytes(), path=path).ranks]


def test_a_disk_of_a_node_gets_its_part_and_a_level_of_all_gets_the_whole(
    warm: Warm, place: Path
) -> None:
    own = ranks(warm, "save_to_levels", place, steps=[1, 2, 3])
    assert own == [["disk"], ["disk"]], "found out when the levels were claimed"
    assert ranks_in(disk(place, "a"), 3) == [0] and ranks_in(disk(place, "b"), 3) == [1]
    assert ranks_in(place / "shared", 3) == [0, 1]
    # Each agent keeps the disk of its own node in order.
    for node in NODES:
        assert committed_steps(disk(place, node)) == (2, 3)

    for name in ("a", "b", "shared"):
        shutil.rmtree(place / name)
    found = ranks(warm, "restore_from_levels", place)
    assert found == [{"step": 3, "same": True}] * 2


def test_a_node_that_lost_all_its_disks_goes_on_from_the_level_of_all(
    warm: Warm, place: Path
) -> None:
    ranks(warm, "save_to_levels", place, steps=[1, 2])
    for lost in (place / "b", disk(place, "b")):
        shutil.rmtree(lost)
    found = ranks(warm, "restore_from_levels", place)
    assert found == [{"step": 2, "same": True}] * 2


def test_one_node_that_is_left_goes_on_from_the_whole_step_and_not_from_its_part(
    warm: Warm, place: Path
) -> None:
    ranks(warm, "save_to_levels", place, steps=[1, 2])
    shutil.rmtree(place / "a")
    (found,) = ranks(warm, "restore_from_levels", place, nodes=["a"])
    assert found == {"step": 2, "same": True}
