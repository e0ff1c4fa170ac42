"""`ckpt-core report`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core import Checkpointer
from tests.cli.test_app import _WITHOUT_TORCH, TOP
from tests.report.lines import line, save, written

Cli = Callable[..., Any]


def test_several_files_make_one_page(cli: Cli, tmp_path: Path) -> None:
    paths = [written(tmp_path / f"rank-{rank}", *save(3, 1.0, rank)) for rank in range(2)]
    answer = cli("report", *paths, "--out", tmp_path / "page.html")
    assert (answer.code, answer.out) == (0, "")
    assert "page.html is written" in answer.err
    text = (tmp_path / "page.html").read_text()
    assert "rank 0" in text and "rank 1" in text
    assert "Checkpoints of rank-0, rank-1" in text


def test_text_that_no_encoding_holds_does_not_stop_it(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "e", line("failed", 1.0, step=1, detail="\ud800"))
    assert cli("report", path, "--out", tmp_path / "page.html").code == 0
    assert "\\ud800" in (tmp_path / "page.html").read_text()


def test_a_root_gives_its_steps_and_is_told_what_it_lacks(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    answer = cli("report", ckpts, "--out", tmp_path / "page.html")
    assert (answer.code, answer.out) == (0, "")
    assert "events_file=" in answer.err
    text = (tmp_path / "page.html").read_text()
    for shown in ("<td>10</td>", "<td>20</td>", "<td>30</td>", "committed, pinned", "newest"):
        assert shown in text
    assert "<b>3</b><span>committed steps</span>" in text


def test_a_root_without_a_step_or_beside_others_is_refused_in_words(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for paths, text in (([tmp_path / "empty"], "no committed step"), ([ckpts, ckpts], "alone")):
        answer = cli("report", *paths, "--out", tmp_path / "page.html")
        assert answer.code == 2
        assert text in answer.err
    assert not (tmp_path / "page.html").exists()


def test_what_a_name_in_a_root_says_is_escaped(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "<script>"
    with Checkpointer(root) as saver:
        saver.save(1, {"n": 1})
    assert cli("report", root, "--out", tmp_path / "page.html").code == 0
    assert "<script>" not in (tmp_path / "page.html").read_text()


def test_nothing_is_written_into_a_step(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    manifest = ckpts / "step-000000000030" / "manifest.json"
    (manifest.parent / "deeper").mkdir()
    (tmp_path / "link.html").symlink_to(manifest)
    before = manifest.read_bytes()
    events = written(tmp_path / "e", *save(3, 1.0))
    for out in (manifest, manifest.parent / "deeper" / "page.html", tmp_path / "link.html"):
        for path in (ckpts, events):
            answer = cli("report", path, "--out", out)
            assert answer.code == 2 and "is in a committed step" in answer.err
    assert manifest.read_bytes() == before
    assert not [*manifest.parent.glob("deeper/*")]


def test_an_event_file_is_never_overwritten(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "e", *save(3, 1.0))
    before = path.read_bytes()
    assert cli("report", path, "--out", path).code == 2
    assert path.read_bytes() == before


def test_it_works_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "e", *save(3, 1.0))
    made = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, "report", path, "--out", tmp_path / "page.html"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
