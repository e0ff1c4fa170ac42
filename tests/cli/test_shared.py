"""What the commands say of files that several steps have."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_verify_reads_a_damaged_file_for_each_step_and_tells_it_of_both(root: Path) -> None:
    with (step_path(root, 1) / "shard-00000-1.safetensors").open("r+b") as file:
        file.seek(8000)
        file.write(b"damaged!")
    assert [step.ok for step in verify_with(root).steps] == [False, False, True]
    rows = json.loads(run("verify", root, "--json")[1])["steps"]
    assert [row["ok"] for row in rows] == [False, False, True]


def test_diff_takes_what_steps_share_for_equal_and_compares_the_rest(root: Path) -> None:
    for other in (2, 3):
        code, text = run("diff", step_path(root, 1), step_path(root, other), "--json")
        found = json.loads(text)
        assert code == 1
        assert found["equal"] == ["base"]
        assert [tensor["path"] for tensor in found["tensors"]] == ["adapter"]
