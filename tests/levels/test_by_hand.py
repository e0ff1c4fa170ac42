"""An agent that somebody has started by hand, and that stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, ConfigError, Level, RootBusy
from ckpt_core.levels import Plan, read_plan, settle_plan, write_plan
from ckpt_core.levels.by_hand import agent as by_hand
from ckpt_core.store import RootLock
from tests.levels.restoring import fill

TOP = Path(__file__).parents[2]

_TOLD_AS_IT_ENDS = """
import os, signal, sys
from pathlib import Path
from ckpt_core.levels.by_hand import agent as by_hand
from ckpt_core.options import Level

root, level = map(Path, sys.argv[1:])
run_agent = by_hand.run_agent

def told_at_the_end(*given, **named):
    run_agent(*given, **named)
    os.kill(os.getpid(), signal.SIGTERM)

by_hand.run_agent = told_at_the_end
by_hand.settle_plan(root, [Level(str(level))])
print(by_hand.serve_agent(root, once=False).ended)
"""


def test_sigterm_that_comes_as_the_agent_ends_by_itself_is_not_lost(tmp_path: Path) -> None:
    fill(tmp_path / "root", 10)
    command = [sys.executable, "-c", _TOLD_AS_IT_ENDS, tmp_path / "root", tmp_path / "level"]
    ended = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "stopped\n", ended.stderr


def test_a_job_that_begins_while_the_levels_are_claimed_finds_the_root_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "root", 10)
    level, claim_here = Level(str(tmp_path / "level")), by_hand.claim_here

    def slowly(*given: Any) -> dict[str, Any]:
        with pytest.raises(RootBusy):
            Checkpointer(tmp_path / "root", levels=[Level(str(tmp_path / "other"))])
        return claim_here(*given)

    monkeypatch.setattr(by_hand, "claim_here", slowly)
    assert settle_plan(tmp_path / "root", [level]) == read_plan(tmp_path / "root")
    with RootLock(tmp_path / "root"):
        pass  # free again


def test_the_plan_that_a_job_makes_while_the_levels_are_claimed_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "root", 10)
    level, claim_here = Level(str(tmp_path / "level")), by_hand.claim_here
    plan = Plan(run="ab" * 8, session=1, token="t", levels=(level,))

    def slowly(*given: Any) -> dict[str, Any]:
        write_plan(tmp_path / "root", plan)
        return claim_here(*given)

    monkeypatch.setattr(by_hand, "claim_here", slowly)
    with RootLock(tmp_path / "root"), pytest.raises(ConfigError, match="says where its steps go"):
        settle_plan(tmp_path / "root", [level])
    assert read_plan(tmp_path / "root") == plan
