"""A job whose loader is in its checkpoints, killed at random batches, sees what it would have seen."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data.data_helpers import check_each_once
from tests.data.job import EVERY, LENGTH, SIZE, STEPS
from tests.forks import Forks

TOP = Path(__file__).parents[2]
KILLS = 2


@pytest.fixture
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@dataclass(frozen=True)
class Life:
    """What one process of the job told, up to its end or until it was killed."""

    returncode: int
    start: int
    batches: dict[int, str]
    end: str


def live(forks: Forks, root: Path, *, kill_after: int | None = None) -> Life:
    """Run the job; kill it once it has told of so many batches."""
    command = [sys.executable, "-W", "error", "-m", "tests.data.job", root]
    start, end = -1, ""
    batches: dict[int, str] = {}
    with forks.popen(command, stdout=subprocess.PIPE, text=True, cwd=TOP) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "start":
                    start = int(rest)
                elif word == "step":
                    step, _, told = rest.partition(" ")
                    batches[int(step)] = told
                    if len(batches) == kill_after:
                        # No reading to the end: its workers hold the pipe until they miss it.
                        process.kill()
                        break
                else:
                    end = rest
            process.wait(60)
        finally:
            process.kill()
    return Life(process.returncode, start, batches, end)


@pytest.mark.timeout(120)
def test_a_job_that_is_killed_sees_each_sample_of_each_epoch_once(
    forks: Forks, tmp_path: Path
) -> None:
    untouched = live(forks, tmp_path / "untouched")
    assert untouched.returncode == 0
    assert sorted(untouched.batches) == list(range(1, STEPS + 1))

    dice, seen, starts = random.Random(8), dict[int, str](), list[int]()
    for _ in range(KILLS):
        life = live(forks, tmp_path / "killed", kill_after=dice.randint(5, 10))
        assert life.returncode == -signal.SIGKILL
        starts.append(life.start)
        seen |= life.batches
    last = live(forks, tmp_path / "killed")
    seen |= last.batches

    assert last.returncode == 0
    assert last.start > 0
    assert all(start % EVERY == 0 for start in starts)
    assert seen == untouched.batches, "the same samples with the same augmentation in every batch"
    assert last.end == untouched.end
    samples = [int(word) for step in sorted(seen) for word in seen[step].split()[0].split(",")]
    for epoch in range(STEPS * SIZE // LENGTH):
        check_each_once(samples[epoch * LENGTH : (epoch + 1) * LENGTH], LENGTH, spare=0)
