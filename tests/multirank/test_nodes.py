"""A root for each node: a step counts when every node holds it, and a lost disk is named."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpt_core import verify
from tests.crash.warm import Warm
from tests.multirank.test_save import run, run_well

NODES = ["a", "a", "b", "b"]


def save(warm: Warm, root: Path, *steps: int) -> None:
    run_well(warm, "save_steps", 4, nodes=NODES, root=str(root), steps=list(steps))


def test_each_node_holds_the_replicated_state_whole(warm: Warm, tmp_path: Path) -> None:
    save(warm, tmp_path, 1, 2)
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        step = tmp_path / node / "step-000000000002"
        written = sorted(path.name for path in step.glob("rank-*"))
        assert written == [f"rank-{rank:05d}.json" for rank in ranks]
        assert verify(tmp_path / node).ok
    found = run_well(warm, "restore_newest", 4, nodes=NODES, root=str(tmp_path))
    assert all(one["step"] == 2 and one["same"] for one in found)
    assert all(one["borrowed_from"] is None for one in found)


def test_a_step_that_one_node_lost_is_passed_over_by_all(warm: Warm, tmp_path: Path) -> None:
    save(warm, tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "b" / "step-000000000002")
    found = run_well(warm, "restore_newest", 4, nodes=NODES, root=str(tmp_path))
    assert [one["step"] for one in found] == [1] * 4
    assert all(one["same"] for one in found)
    # Training goes on from there, and the step that only one node held no longer stands as the newest.
    save(warm, tmp_path, 2, 3)
    found = run_well(warm, "restore_newest", 4, nodes=NODES, root=str(tmp_path))
    assert [one["step"] for one in found] == [3] * 4


def test_a_node_that_lost_everything_is_named_and_nothing_starts_from_scratch(
    warm: Warm, tmp_path: Path
) -> None:
    save(warm, tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "b")
    outcomes = run(warm, "restore_newest", 4, nodes=NODES, root=str(tmp_path))
    for outcome in outcomes:
        assert "NotCommitted" in outcome["problem"], outcome
        assert "rank 2" in outcome["problem"], outcome


def test_a_corrupt_file_on_one_node_makes_all_go_back_together(warm: Warm, tmp_path: Path) -> None:
    save(warm, tmp_path, 1, 2)
    (shard,) = (tmp_path / "b" / "step-000000000002").glob("shard-00003-0*")
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    found = run_well(warm, "restore_newest", 4, nodes=NODES, root=str(tmp_path))
    assert [one["step"] for one in found] == [1] * 4
    assert all(one["same"] for one in found)
