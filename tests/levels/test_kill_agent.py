"""kill -9 of the agent at any file operation: nothing half is visible, and the next one goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 16


@pytest.mark.parametrize("kind", ["exchange", "two"])
@pytest.mark.parametrize("scenario", ["more", "replace", "pins"])
def test_a_kill_of_the_agent_at_any_operation_shows_nothing_half_and_loses_nothing(
    scenario: str, kind: str, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), scenario, kind, str(MOST)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(f"{done.stdout.strip()} kills")
    assert int(done.stdout) >= MOST // 2 - 1, "next to nothing was killed"
