"""Whatever bytes a reader gets, it gives a value or an error of ours, soon and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 13
SOME = 3000
ALL = 100_000


def fuzz(tmp_path: Path, seed: int, count: int, *, timeout_s: float) -> dict[str, float]:
    """Run so many inputs in a process of their own; what came of them, by kind."""
    at = tmp_path / "at"
    done = subprocess.run(
        [sys.executable, "-m", "tests.restore.fuzzing", str(seed), str(count)],
        cwd=ROOT,
        env={**os.environ, "FUZZ_AT": str(at)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    number = at.read_text().strip() if at.exists() else "none"
    again = f"python -m tests.restore.fuzzing {seed} 1 '' {number}"
    assert done.returncode == 0, (
        f"input {number} of seed {seed} ended the process with {done.returncode}; again: {again}\n"
        f"{done.stderr[-6000:]}"
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


def test_some_thousand_inputs_give_values_or_errors_of_ours(tmp_path: Path) -> None:
    found = fuzz(tmp_path, SEED, SOME, timeout_s=250)
    assert found["count"] == SOME
    assert found["a value"] > SOME / 50
    assert found["CorruptCheckpoint"] > SOME / 10


@pytest.mark.timeout(1800)
@pytest.mark.skipif("CKPT_FUZZ" not in os.environ, reason="set CKPT_FUZZ=1 to try all inputs")
def test_a_hundred_thousand_inputs_give_values_or_errors_of_ours(tmp_path: Path) -> None:
    assert fuzz(tmp_path, SEED + 1, ALL, timeout_s=1700)["count"] == ALL
