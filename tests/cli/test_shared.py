"""What the commands say of files that several steps have."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckpt_core import Checkpointer, Options
from ckpt_core.cli.app import app
from ckpt_core.restore import verify as verify_with
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from ckpt_core.units import size_text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three steps; the first two have a file in common."""
    state = {"base": torch.arange(5000.0), "adapter": torch.zeros(300)}
    options = Options(
        share_unchanged=True, frozen=["base"], eager_leaf_bytes=256, rebase_every=2, keep_last=None
    )
    with Checkpointer(tmp_path, options) as ck:
        for step in (1, 2, 3):
            state["adapter"] += 1
            ck.save(step, state).committed.result(60)
    return tmp_path


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_ls_shows_what_each_step_adds(root: Path) -> None:
    code, text = run("ls", root, "--json")
    rows = json.loads(text)
    assert code == 0
    sizes = [row["file_bytes"] for row in rows["steps"]]
    added = [row["added_bytes"] for row in rows["steps"]]
    assert (sizes[0], sizes[2]) == (added[0], added[2])
    assert 0 < added[1] < sizes[1] / 2
    slots = rows["slots"]["file_bytes"]
    assert rows["file_bytes"] == sum(added) + slots
    assert "adds" in run("ls", root)[1]


def test_the_page_of_a_root_shows_what_each_step_adds(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    added = json.loads(run("ls", root, "--json")[1])["steps"][1]["added_bytes"]
    assert run("report", root, "--out", out)[0] == 0
    page = out.read_text()
    assert ">adds<" in page and f">{size_text(added)}<" in page


def test_verify_says_which_steps_have_the_damaged_file(root: Path) -> None:
    shard = step_path(root, 1) / "shard-00000-1.safetensors"
    with shard.open("r+b") as file:
        file.seek(8000)
        file.write(b"damaged!")
    code, text = run("verify", root)
    assert code == 1
    assert f"{shard.name} is one file with that of step 2" in text
    code, text = run("verify", step_path(root, 2), "--json")
    assert json.loads(text)["steps"][0]["shared"] == {shard.name: [1]}


class Heard(Files):
    """Notes which files are opened to be read."""

    def __init__(self) -> None:
        self.opened: list[Path] = []

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        self.opened.append(path)
        return super().open_read(path, direct=direct)


def test_verify_reads_a_file_that_several_steps_have_once(root: Path) -> None:
    files = Heard()
    report = verify_with(root, files=files)
    still = [path.parent.name for path in files.opened if path.name.endswith("-1.safetensors")]
    # Headers are looked at in each step, before the bytes are read.
    both = [still.count(f"step-{step:012d}") for step in (1, 2, 3)]
    assert both[0] == both[2] > both[1] > 0
    assert report.ok and len({step.checked_bytes for step in report.steps}) == 1


def test_verify_reads_a_damaged_file_that_several_steps_have_once_and_tells_it_of_each(
    root: Path,
) -> None:
    shard = step_path(root, 1) / "shard-00000-1.safetensors"
    with shard.open("r+b") as file:
        file.seek(8000)
        file.write(b"damaged!")
    files = Heard()
    report = verify_with(root, files=files)
    assert [step.ok for step in report.steps] == [False, False, True]
    first, second = report.bad_chunks
    assert second == replace(first, path=step_path(root, 2) / shard.name)
    assert len({step.checked_bytes for step in report.steps}) == 1
    opened = [path for path in files.opened if path.name == shard.name]
    # The second step's header is looked at.
    assert opened.count(first.path) > opened.count(second.path) > 0
    rows = json.loads(run("verify", root, "--json")[1])["steps"]
    assert [row["ok"] for row in rows] == [False, False, True]


def test_verify_of_many_steps_with_one_damaged_file_looks_at_each_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, count = {"base": torch.arange(5000.0), "adapter": torch.zeros(300)}, 30
    options = Options(share_unchanged=True, frozen=["base"], rebase_every=99, keep_last=None)
    with Checkpointer(tmp_path, options) as ck:
        for step in range(count):
            state["adapter"] += 1
            ck.save(step, state).committed.result(60)
    with (step_path(tmp_path, 0) / "shard-00000-1.safetensors").open("r+b") as file:
        file.seek(8000)
        file.write(b"damaged!")
    looks, scandir = [], os.scandir

    def noted(path: Path) -> Any:
        looks.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    code, text = run("verify", tmp_path)
    assert code == 1 and len(looks) <= 4 * count
    told = [line.strip() for line in text.splitlines() if "is one file with" in line]
    assert len(told) == count
    numbers = ", ".join(map(str, range(1, 13)))
    assert told[0].endswith(f" is one file with that of 29 steps: {numbers}, ...")
    looks.clear()
    rows = json.loads(run("verify", tmp_path, "--json")[1])["steps"]
    assert len(looks) <= 4 * count
    assert [[*range(step), *range(step + 1, count)] for step in range(count)] == [
        row["shared"]["shard-00000-1.safetensors"] for row in rows
    ]


def test_diff_takes_what_steps_share_for_equal_and_compares_the_rest(root: Path) -> None:
    for other in (2, 3):
        code, text = run("diff", step_path(root, 1), step_path(root, other), "--json")
        found = json.loads(text)
        assert code == 1
        assert found["equal"] == ["base"]
        assert [tensor["path"] for tensor in found["tensors"]] == ["adapter"]
