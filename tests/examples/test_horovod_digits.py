"""The Horovod example: a rank is killed, the job starts again, and ends in the bits of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.examples.runs import EXAMPLES, Job

pytest.importorskip("horovod")
pytest.importorskip("sklearn")

EXAMPLE = EXAMPLES / "horovod_digits.py"
STEPS, EVERY = 90, 4  # nearly four epochs
LIMIT_S = 120


@dataclass(frozen=True)
class Ranks(Job):
    """The job of this example, of two processes."""

    def run(self, *, kill_after: int | None = None, seed: int = 0) -> tuple[int, str]:
        """The command, to its end, or until a rank is killed once so many losses were told since a commit."""
        command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2"]
        command += [sys.executable, str(EXAMPLE), *self.arguments(steps=STEPS, every=EVERY)]
        before, output, told = self._newest(), "", 0
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    output += line
                    told += "step " in line and self._newest() > before
                    if told == kill_after:
                        _kill_one(process.pid, seed)
                        kill_after = None
                process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                    process.kill()
        return process.returncode, output

    def _newest(self) -> str:
        return max((path.name for path in self.root.glob("step-*")), default="")


def _kill_one(launcher: int, seed: int) -> None:
    ranks = [
        child
        for child in psutil.Process(launcher).children(recursive=True)
        if child.name().startswith("python") and str(EXAMPLE) in child.cmdline()
    ]
    chosen = random.Random(seed).choice(sorted(ranks, key=lambda child: child.pid))
    chosen.send_signal(signal.SIGKILL)


def _resumed(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from step (\d+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """A run that nobody interrupts."""
    job = Ranks(tmp_path_factory.mktemp("untouched"))
    code, output = job.run()
    assert code == 0, output
    assert not _resumed(output)
    return job


def test_a_job_one_of_whose_ranks_is_killed_ends_in_the_same_bits(
    untouched: Ranks, tmp_path: Path
) -> None:
    job = Ranks(tmp_path)
    for seed in range(2):
        code, output = job.run(kill_after=1 + 2 * seed, seed=seed)
        assert code != 0, "a job one of whose ranks was killed does not end well"
    code, output = job.run()
    assert code == 0, output
    resumed = _resumed(output)
    assert len(resumed) == 2 and len(set(resumed)) == 1, "both ranks resume from one step"
    assert resumed[0] % EVERY == 0
    assert job.result.read_bytes() == untouched.result.read_bytes()


def test_the_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
