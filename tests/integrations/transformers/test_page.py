"""docs/transformers.md agrees with the callback, and its code runs as it stands there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from ckpt_core import committed_steps
from ckpt_transformers import AsyncCheckpoint
from tests.docs.prepared import run_page

PAGE = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()


def test_the_code_of_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/transformers.md")
    assert committed_steps(Path("ckpts")) == (4, 6)
    assert names["folder"].is_dir()


@pytest.mark.parametrize("name", list(inspect.signature(AsyncCheckpoint).parameters)[1:])
def test_each_argument_of_ours_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\b|\b{name.title()}\(", PAGE), name


def test_each_training_argument_that_the_page_names_exists() -> None:
    _, _, section = PAGE.partition("## What becomes of TrainingArguments")
    rows = [line.split("|")[1] for line in section.partition("##")[0].splitlines() if "|" in line]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 10
    assert names <= set(inspect.signature(TrainingArguments).parameters)
