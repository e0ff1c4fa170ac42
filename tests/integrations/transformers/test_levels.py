"""Further roots under the Trainer: an empty disk is no fresh start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core import committed_steps
from ckpt_transformers import AsyncCheckpoint
from tests.integrations.transformers.jobs import SMALL, DiesAt, run, run_stock
from tests.levels.trainers import end_agent, wait_for_agent


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where the run saves to that is cut short; its agent ends with the test."""
    root = tmp_path / "cut" / "ckpts"
    yield root
    end_agent(root)


@pytest.mark.filterwarnings("ignore:the level")
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_run_that_loses_its_disk_goes_on_from_the_level_bit_for_bit(
    by: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(tmp_path / "whole", max_steps=10)
    levels = [{"url": str(tmp_path / "far"), "every": 4}]
    if by == "environment":
        monkeypatch.setenv("CKPT_CORE_LEVELS", json.dumps(levels))

    def saver() -> AsyncCheckpoint:
        given = levels if by == "argument" else None
        return AsyncCheckpoint(root, levels=given, options=SMALL)

    with pytest.raises(KeyboardInterrupt):
        run(root.parent, DiesAt(7), saver=saver(), max_steps=10)
    wait_for_agent(root)
    assert committed_steps(tmp_path / "far")[-1] == 6, "the newest, once nobody saves any more"
    shutil.rmtree(root)
    assert run(root.parent, saver=saver(), max_steps=10) == expected
    assert committed_steps(root)[0] == 6


@pytest.mark.filterwarnings("ignore:the level")
def test_where_no_level_holds_a_step_a_run_goes_on_from_what_trainer_saved(
    root: Path, tmp_path: Path
) -> None:
    run_stock(root.parent, max_steps=6, save_steps=3)
    saver = AsyncCheckpoint(root, levels=[str(tmp_path / "far")], options=SMALL)
    run(root.parent, saver=saver, max_steps=8)
    assert committed_steps(root) == (8,)


@pytest.mark.filterwarnings("ignore:the level")
def test_a_step_at_a_level_wins_over_what_trainer_saved(root: Path, tmp_path: Path) -> None:
    def saver() -> AsyncCheckpoint:
        return AsyncCheckpoint(root, levels=[str(tmp_path / "far")], options=SMALL)

    run_stock(root.parent, max_steps=2)
    expected = run(root.parent, saver=saver(), max_steps=6)
    wait_for_agent(root)
    shutil.rmtree(root)
    assert run(root.parent, saver=saver(), max_steps=6) == expected
    assert committed_steps(root) == (6,)
