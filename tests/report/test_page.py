"""The page: well-formed, self-contained, and harmless whatever the file says."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from ckpt_core import Checkpointer, Options
from ckpt_core.report import gather, page
from tests.report.lines import line, save, written

HOSTILE = "<script>alert(1)</script>\"'&]]> \x1b[2J"


def parsed(text: str) -> ElementTree.Element:
    """The page is XML too, so that any unescaped sign is an error."""
    head, body = text.split("\n", 1)
    assert head == "<!doctype html>"
    return ElementTree.fromstring(body)


def told(text: str) -> str:
    return " ".join(parsed(text).itertext())


def test_the_page_of_a_real_run_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    state = {"weight": torch.zeros(1000)}
    with Checkpointer(tmp_path / "root", Options(events_file=events, keep_last=1)) as checkpointer:
        for step in range(6):
            checkpointer.wait_staged()
            checkpointer.save(step, state).committed.result(60)
    text = page(gather([events]), title="a run")
    found = parsed(text)
    assert not re.search(r"https?:|<script|<link|url\(|@import|src=", text)
    assert "6 steps saved" in told(text)
    assert found.find(".//table") is not None
    assert len(found.findall(".//svg")) == 3


def test_text_of_a_file_is_shown_and_never_obeyed(tmp_path: Path) -> None:
    lines = [
        line("opened", 0.5, host=HOSTILE, unix_s=1.0),
        line("begin", 1.0, step=1),
        line("failed", 1.1, step=1, detail=HOSTILE),
        line("level_reached", 1.2, step=1, detail=HOSTILE),
        line("level_problem", 1.3, detail="\ud800"),
    ]
    text = page(gather([written(tmp_path / "e", *lines)]), title=HOSTILE)
    assert "<script" not in text
    assert told(text).count("<script>alert(1)</script>") >= 4


@pytest.mark.parametrize(
    "more",
    [
        {"step": 10**400, "nbytes": 10**400, "waited_s": 10**400},
        {"step": -1, "nbytes": -5, "seconds": -1e300, "waited_s": -1.0},
        {"step": True, "nbytes": "x", "seconds": None, "waited_s": [], "options": 3},
        {"time_s": 10**400},
        {"time_s": 1e15, "step": 1, "unix_s": -1e15, "host": {}},
        {"rank": 10**30, "step": 2},
    ],
)
def test_values_out_of_all_measure_still_make_a_page(
    tmp_path: Path, more: dict[str, object]
) -> None:
    names = ("opened", "begin", "staged", "waited", "committed", "begin", "restored", "failed")
    odd = [line(name, 2.0) | more for name in names]
    told(page(gather([written(tmp_path / "e", *save(1, 1.0), *odd)]), title="odd"))


def test_a_page_of_one_line_says_that_nothing_was_saved(tmp_path: Path) -> None:
    text = page(gather([written(tmp_path / "e", line("opened", 1.0))]), title="nothing")
    assert "0 steps saved" in told(text)
