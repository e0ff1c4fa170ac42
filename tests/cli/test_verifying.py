"""`verify`."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.layout import RankManifest
from tests.restore.harness import FailingReads

Cli = Callable[..., Any]
Damage = Callable[[Path, int], None]
TOP = Path(__file__).parents[2]
SHARD = "shard-00000-0.safetensors"


def _leaf(step: Path, name: str) -> Any:
    path = step / "rank-00000.json"
    leaves = RankManifest.decode(path.read_bytes(), path=path).leaves
    return next(leaf for leaf in leaves if leaf.spec.name == name)


def test_a_sound_root_is_all_ok(cli: Cli, ckpts: Path) -> None:
    answer = cli("verify", ckpts)
    assert answer.code == 0
    assert [line.split(",")[0] for line in answer.out.splitlines()] == [
        "step 10: ok",
        "step 20: ok",
        "step 30: ok",
    ]
    assert answer.err == ""


def test_one_step_can_be_verified_alone(cli: Cli, ckpts: Path) -> None:
    for arguments in ([ckpts, "--step", 20], [ckpts / "step-000000000020"]):
        answer = cli("verify", *arguments)
        assert answer.code == 0
        assert answer.out.startswith("step 20: ok")
        assert answer.out.count("\n") == 1


def test_what_this_user_may_not_read_is_no_damage(
    cli: Cli, ckpts: Path, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ckpts / "step-000000000020"
    refusing = FailingReads(f"{step.name}/", errno.EACCES)
    monkeypatch.setattr("ckpt_core.cli.places.Files", lambda: refusing)
    answer = cli("verify", ckpts)
    assert answer.code == 2
    assert "step 20: NOT READ, 1 finding" in answer.out and "step 30: ok" in answer.out
    assert "no permission to read step 20: whether that is sound is not known" in answer.err
    found = json.loads(cli("verify", ckpts, "--json").out)["steps"][1]
    assert not found["ok"] and found["unread"] == found["problems"] != []
    damage(ckpts / "step-000000000030" / SHARD, 9000)
    answer = cli("verify", ckpts)
    assert answer.code == 1
    assert "step 20: NOT READ" in answer.out and "step 30: DAMAGED" in answer.out


def test_a_flipped_byte_is_found_with_the_leaves_that_it_hits(
    cli: Cli, save: Callable[..., Path], damage: Damage
) -> None:
    step = save({"a": torch.ones(1000), "b": torch.ones(100_000)}, chunk_bytes=65536)
    leaf = _leaf(step, "b")
    damage(step / SHARD, leaf.offset + leaf.nbytes - 1)
    answer = cli("verify", step)
    assert answer.code == 1
    assert "step 7: DAMAGED, 1 finding" in answer.out
    assert "1 leaf hit: b\n" in answer.out
    found = json.loads(cli("verify", step, "--json").out)
    assert not found["ok"]
    (bad,) = found["steps"][0]["bad_chunks"]
    assert bad["file"] == SHARD
    assert bad["leaves"] == ["b"]
    assert bad["index"] == bad["offset"] // 65536 == (leaf.offset + leaf.nbytes - 1) // 65536


def test_a_byte_of_padding_hits_no_leaf(
    cli: Cli, save: Callable[..., Path], damage: Damage
) -> None:
    step = save({"b": torch.ones(3, 1000)}, chunk_bytes=4096)
    damage(step / SHARD, (step / SHARD).stat().st_size - 1)
    found = json.loads(cli("verify", step, "--json").out)
    leaf = _leaf(step, "b")
    (bad,) = found["steps"][0]["bad_chunks"]
    expected = ["b"] if leaf.offset + leaf.nbytes > bad["offset"] else []
    assert bad["leaves"] == expected


def test_other_damage_is_a_problem(cli: Cli, ckpts: Path) -> None:
    os.truncate(ckpts / "step-000000000010" / SHARD, 5000)
    (ckpts / "step-000000000020" / "rank-00000.json").unlink()
    (ckpts / "step-000000000030" / "manifest.json").write_bytes(b"")
    answer = cli("verify", ckpts)
    assert answer.code == 1
    assert answer.out.count("DAMAGED, 1 finding") == 3
    found = json.loads(cli("verify", ckpts, "--json").out)
    assert all(len(step["problems"]) == 1 for step in found["steps"])


def test_bytes_without_checksum_are_told(cli: Cli, save: Callable[..., Path]) -> None:
    answer = cli("verify", save({"x": torch.ones(9)}, checksum=False))
    assert answer.code == 0
    assert "without checksum" in answer.out


def test_nothing_to_verify_is_an_error(cli: Cli, tmp_path: Path) -> None:
    answer = cli("verify", tmp_path)
    assert answer.code == 2
    assert "holds no committed step" in answer.err


@pytest.mark.timeout(120)
def test_damage_is_red_where_there_are_colours_and_nothing_else_is(
    cli: Cli,
    ckpts: Path,
    damage: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(ckpts / "step-000000000020" / "shard-00000-0.safetensors", 9000)
    assert "\x1b" not in cli("verify", ckpts).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = cli("verify", ckpts).out
    assert out.count("\x1b[31m") == 1 and "\x1b[31mstep 20: DAMAGED" in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in cli("verify", ckpts).out


def test_progress_is_drawn_on_a_terminal_beside_the_answer(ckpts: Path) -> None:
    leader, follower = pty.openpty()
    program = (
        "from ckpt_core.cli import main\n"
        "from ckpt_core.observe import progress\n"
        "progress._SHORT_S = progress._DRAWN_S = 0.0  # as if it took long\n"
        "main()"
    )
    command = [sys.executable, "-c", program, "verify", str(ckpts)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    made = subprocess.run(
        command, cwd=TOP, stdout=subprocess.PIPE, stderr=follower, env=environ, check=False
    )
    os.close(follower)
    drawn = os.read(leader, 65536).decode()
    os.close(leader)
    assert made.returncode == 0
    assert "step-000000000030 (3/3)" in drawn
    assert b"\x1b" not in made.stdout
