"""`scrub`, as a person sees it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.levels import write_plan
from ckpt_core.options import Level
from ckpt_core.restore import verify
from ckpt_core.store import step_path
from tests.levels.agents import plan_of
from tests.restore.harness import flip

Cli = Callable[..., Any]


def test_what_is_damaged_is_repaired_from_a_level_and_told(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    level = tmp_path / "level"
    shutil.copytree(ckpts, level)
    write_plan(ckpts, plan_of(Level(str(level))))
    flip(step_path(ckpts, 20) / "shard-00000-0.safetensors", 9000)
    alone = cli("scrub", ckpts)
    assert alone.code == 1 and "no other place" in alone.out
    looked = cli("scrub", "--levels", "--dry-run", ckpts, "--json")
    assert looked.code == 1
    assert [one["ok"] for one in json.loads(looked.out)["steps"]].count(False) == 1
    assert not verify(ckpts).ok
    answer = cli("scrub", "--levels", ckpts, "--bandwidth", "1GB/s")
    assert answer.code == 0 and verify(ckpts).ok
    assert f"step 20 of {ckpts}: repaired from {level}" in answer.out
    assert "chunks 0 are not what was saved" in answer.out
    assert answer.out.splitlines()[-1].startswith("6 steps, ")
    assert answer.out.splitlines()[-1].endswith(": 1 repaired, 0 left damaged")
    again = json.loads(cli("scrub", ckpts, level, "--json").out)
    assert again["ok"] and not any(one["damage"] for one in again["steps"])


def test_a_place_that_is_not_there_is_an_error(cli: Cli, tmp_path: Path) -> None:
    answer = cli("scrub", tmp_path / "none")
    assert answer.code == 2 and "there is no such directory" in answer.err
