"""kill -9 at any file operation of whoever makes parity or rebuilds from it: nothing half is ever visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 8


@pytest.mark.parametrize(
    ("scenario", "kind"), [("encode", "exchange"), ("encode", "two"), ("bring", "exchange")]
)
def test_a_kill_at_any_operation_shows_nothing_half_and_the_next_try_goes_on(
    scenario: str, kind: str, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.levels.parity.kills",
            str(tmp_path),
            scenario,
            kind,
            str(MOST),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=program.parents[3],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) >= 4, "next to nothing was killed"
