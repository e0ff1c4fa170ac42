"""Several ranks share files of earlier steps, each its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import load, verify
from ckpt_core.store import step_path
from tests.crash.warm import Warm
from tests.multirank.crew import all_well
from tests.multirank.jobs import same
from tests.multirank.still_jobs import make_state


@pytest.mark.parametrize("settings", [{"frozen": ["base", "own.table"]}, {"rebase_every": 3}])
def test_each_rank_links_its_own_files_and_all_steps_are_whole(
    warm: Warm, tmp_path: Path, settings: dict[str, Any]
) -> None:
    steps = list(range(1, 10))
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call="tests.multirank.still_jobs:save_steps",
        world_size=2,
        arguments={"root": str(tmp_path), "steps": steps, "keep_last": 4, **settings},
    )
    assert all_well(outcomes) == [[6, 7, 8, 9]] * 2
    for step in (6, 7, 8, 9):
        tree = load(step_path(tmp_path, step))
        expected = make_state(0, step)
        assert same(tree["base"], expected["base"])
        assert torch.equal(tree["adapter"], expected["adapter"])
    for rank in (0, 1):
        still = [path.stat() for path in tmp_path.glob(f"step-*/shard-{rank:05d}-1.safetensors")]
        assert len({one.st_ino for one in still}) < len(still) == 4
    assert verify(tmp_path).ok
