"""`scrub`, as a person sees it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.levels import write_plan
from ckpt_core.levels.tokens import TOKEN_VARIABLE
from ckpt_core.options import Level
from ckpt_core.restore import verify
from ckpt_core.store import step_path
from tests.levels.agents import plan_of
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN
from tests.restore.harness import FailingReads, flip

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


@needs_store
def test_what_was_read_is_told_where_a_place_is_away(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(TOKEN)
    write_plan(ckpts, plan_of(Level("peer://127.0.0.1:1/run")))
    flip(step_path(ckpts, 20) / "shard-00000-0.safetensors", 9000)
    answer = cli("scrub", "--levels", ckpts)
    assert answer.code == 2 and "cannot be reached" in answer.err
    assert "3 steps, " in answer.out and "0 repaired, 1 left damaged" in answer.out
    told = json.loads(cli("scrub", "--levels", ckpts, "--json").out)
    assert not told["ok"] and [one["ok"] for one in told["steps"]] == [True, False, True]


def test_a_place_that_is_not_there_is_an_error(cli: Cli, tmp_path: Path) -> None:
    answer = cli("scrub", tmp_path / "none")
    assert answer.code == 2 and "there is no such directory" in answer.err


def test_what_this_user_may_not_read_is_told_and_is_no_finding(
    cli: Cli, ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = FailingReads("step-000000000020/shard", errno.EACCES)
    monkeypatch.setattr("ckpt_core.levels.by_hand.scrubbing.Files", lambda: refusing)
    answer = cli("scrub", ckpts)
    assert answer.code == 2 and f"step 20 of {ckpts}: NOT READ" in answer.out
    assert "0 repaired, 0 left damaged" in answer.out
    assert f"no permission to read step 20 of {ckpts}: whether that is sound" in answer.err
    flip(step_path(ckpts, 30) / "shard-00000-0.safetensors", 9000)
    answer = cli("scrub", ckpts)
    assert answer.code == 1 and "0 repaired, 1 left damaged" in answer.out


def test_steps_are_read_beside_one_whose_manifest_this_user_may_not_read(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = tmp_path / "level"
    shutil.copytree(ckpts, level)
    flip(step_path(level, 30) / "shard-00000-0.safetensors", 9000)
    refusing = FailingReads("ckpts/step-000000000020/", errno.EACCES)
    monkeypatch.setattr("ckpt_core.levels.by_hand.scrubbing.Files", lambda: refusing)
    alone = cli("scrub", ckpts)
    assert alone.code == 2 and f"step 20 of {ckpts}: NOT READ" in alone.out
    assert f"step 10 of {ckpts}: ok" in alone.out and f"step 30 of {ckpts}: ok" in alone.out
    both = cli("scrub", ckpts, level)
    assert both.code == 2 and f"step 30 of {level}: repaired from {ckpts}" in both.out
    flip(step_path(level, 20) / "shard-00000-0.safetensors", 9000)
    both = cli("scrub", ckpts, level)
    assert both.code == 1 and f"{ckpts}: no permission to read step-000000000020" in both.out


def test_a_directory_of_files_that_this_user_may_not_read_is_told_behind_the_steps(
    cli: Cli, ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(step_path(ckpts, 20), ckpts / "tag")
    refusing = FailingReads("ckpts/tag/", errno.EACCES)
    monkeypatch.setattr("ckpt_core.levels.by_hand.scrubbing.Files", lambda: refusing)
    answer = cli("scrub", ckpts)
    assert answer.code == 2 and answer.out.count(": ok, ") == 3
    assert f"{ckpts}: no permission to read tag: whether that is sound is not known" in answer.err
