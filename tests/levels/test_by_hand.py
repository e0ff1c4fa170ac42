"""An agent that somebody has started by hand, and that stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
