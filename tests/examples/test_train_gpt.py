"""The main example, however often it is killed, ends in the bits of a run that nobody touched."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Job, Run

EXAMPLE = EXAMPLES / "train_gpt.py"
STEPS, EVERY, KILLS = 40, 4, 2
STOPPED = 143

# A thread's first product may open CUDA's context, of which torch warns.
STRICT = ("-W", "error", "-W", "ignore:Attempting to run cuBLAS")


@dataclass(frozen=True)
class Gpt(Job):
    """The job of this example."""

    def run(self, *, kill: signal.Signals | None = None, after_s: float = 0.0) -> Run:
        """The command, to its end, or until `kill` is sent `after_s` after the first step began."""
        command = [sys.executable, *STRICT, str(EXAMPLE)]
        command += self.arguments(steps=STEPS, every=EVERY)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            output = _read_until_training(process.stdout)
            if kill is not None:
                time.sleep(after_s)
                process.send_signal(kill)
            output += process.stdout.read()
        return Run(process.returncode, output)


def _read_until_training(lines: IO[str]) -> str:
    output = ""
    for line in lines:
        output += line
        if line == "training\n":
            break
    return output


@dataclass(frozen=True)
class Finished:
    """A job that ran to its end, and what it left."""

    job: Gpt
    result: bytes
    seconds: float


@pytest.fixture(scope="module", params=DEVICES)
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that nobody interrupts."""
    job = Gpt(tmp_path_factory.mktemp("untouched"), device=request.param)
    started = time.monotonic()
    run = job.run()
    assert run.returncode == 0, run.output
    assert run.resumed is None
    return Finished(job, job.result.read_bytes(), time.monotonic() - started)


def test_a_job_that_is_killed_again_and_again_ends_in_the_same_bits(
    untouched: Finished, tmp_path: Path
) -> None:
    job, dice = Gpt(tmp_path, device=untouched.job.device), random.Random(20)
    resumed: list[int] = []
    for _ in range(KILLS):
        # A third of the whole run at most, so that the kills rarely reach the end of the job.
        run = job.run(kill=signal.SIGKILL, after_s=dice.uniform(0.0, untouched.seconds / 3))
        resumed += [] if run.resumed is None else [run.resumed]
        assert run.returncode in (-signal.SIGKILL, 0), run.output
    last = job.run()

    assert last.returncode == 0, last.output
    assert last.resumed is not None
    assert resumed == sorted(resumed), "a restart never goes back behind an earlier one"
    assert last.resumed % EVERY == 0
    assert job.result.read_bytes() == untouched.result


def test_a_job_that_gets_sigterm_saves_the_step_it_is_in_and_resumes_there(
    untouched: Finished, tmp_path: Path
) -> None:
    job = Gpt(tmp_path, device=untouched.job.device)
    first = job.run(kill=signal.SIGTERM)
    stopped = re.search(r"^stopped at step (\d+)$", first.output, re.MULTILINE)
    assert first.returncode == STOPPED, first.output
    assert stopped is not None, first.output
    assert not job.result.exists()

    second = job.run()
    assert second.returncode == 0, second.output
    assert second.resumed == int(stopped[1])
    assert job.result.read_bytes() == untouched.result


def test_a_job_that_is_done_only_repeats_its_result(untouched: Finished) -> None:
    untouched.job.result.unlink()
    again = untouched.job.run()

    assert again.returncode == 0, again.output
    assert again.resumed == STEPS
    assert untouched.job.result.read_bytes() == untouched.result
