"""Ranks that end while threads of the engine are inside a call of torch: none is aborted, and none hangs.

A daemon thread that comes back from C++ code when Python is gone ends the process with SIGABRT ("terminate
called without an active exception"). Here each rank is interrupted at random instants of its end, and closes
nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multirank.endings import WAYS

REPO = Path(__file__).parents[2]
JOBS = 10


@pytest.mark.parametrize("way", WAYS)
def test_no_rank_is_aborted_however_it_ends(way: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.multirank.endings", way, str(JOBS), str(tmp_path), "1"]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=280, check=True
    )
    codes = json.loads(done.stdout)
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*/log-*")))
    # Ended well, by an error of the loop or of the other rank, or by the interrupt.
    assert len(codes) == 2 * JOBS and set(codes) <= {0, 1, -signal.SIGINT}, (codes, logs)
