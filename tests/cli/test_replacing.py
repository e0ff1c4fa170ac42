"""Pages, pictures and tables that commands write: where the disk is full, the old one stays whole."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_simulate import SMALL

Cli = Callable[..., Any]
IMG = Path(__file__).parents[2] / "docs" / "img"
BENCH = ("bench", "--from", str(IMG / "bench.json"))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        pytest.param(("report", "ROOT", "--out"), "page.html", id="report"),
        pytest.param(("simulate", *SMALL, "--plot"), "x.png", id="simulate-plot"),
        pytest.param(("simulate", *SMALL, "--csv"), "x.csv", id="simulate-csv"),
        pytest.param((*BENCH, "--json"), "x.json", id="bench-json"),
        pytest.param((*BENCH, "--plot"), "x.png", id="bench-plot"),
        pytest.param((*BENCH, "--headline"), "x.svg", id="bench-headline"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_is_named(
    cli: Cli, ckpts: Path, tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir()
    arguments = [ckpts if word == "ROOT" else word for word in words]
    # Python and matplotlib keep files for later, too: all is imported before, and written by then.
    assert cli(*arguments, path).code == 0
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))  # its error comes the same way
    try:
        answer = cli(*arguments, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert answer.code == 2
    assert f"ckpt-core: {path}: File too large" in answer.err
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [name]


@pytest.mark.parametrize("words", [("simulate", *SMALL, "--csv"), (*BENCH, "--json")])
def test_nothing_is_written_within_a_step(cli: Cli, ckpts: Path, words: tuple[str, ...]) -> None:
    path = ckpts / "step-000000000010" / "manifest.json"
    before = path.read_bytes()
    answer = cli(*words, path)
    assert answer.code == 2 and "is in a committed step" in answer.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["", "x", "link"])
def test_no_pictures_are_written_into_a_step(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str
) -> None:
    step = ckpts / "step-000000000010"
    (tmp_path / "link").symlink_to(step)
    before = sorted(os.listdir(step))
    out = tmp_path / "link" if name == "link" else step / name
    answer = cli("bench", "--suite", "papers", "--quick", "--out", out)
    assert answer.code == 2 and "is in a committed step" in answer.err
    assert sorted(os.listdir(step)) == before
