"""The example for several processes: any of them is killed, all start again, and the bits are the same."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.examples.runs import EXAMPLES, Job

EXAMPLE = EXAMPLES / "ddp_gpt.py"
STEPS, EVERY = 24, 3
LIMIT_S = 240


@dataclass(frozen=True)
class Ranks(Job):
    """The job of this example, of several processes."""

    ranks: int = 2

    def run(self, *, kill_after_s: float | None = None, seed: int = 0) -> tuple[int, str]:
        """The command, to its end, or until one of its ranks is killed; exit code and output."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.ranks), str(EXAMPLE)]
        command += self.arguments(steps=STEPS, every=EVERY)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            output = ""
            try:
                for line in process.stdout:
                    output += line
                    if line == "training\n" and kill_after_s is not None:
                        time.sleep(kill_after_s)
                        _kill_one(process.pid, seed)
                        kill_after_s = None
                process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                    process.kill()
        return process.returncode, output


def _kill_one(launcher: int, seed: int) -> None:
    ranks = [
        child
        for child in psutil.Process(launcher).children()
        if EXAMPLE.name in " ".join(child.cmdline())
    ]
    if ranks:
        random.Random(seed).choice(sorted(ranks, key=lambda child: child.pid)).send_signal(
            signal.SIGKILL
        )


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranks, bytes]:
    """A run that nobody interrupts."""
    job = Ranks(tmp_path_factory.mktemp("untouched"))
    code, output = job.run()
    assert code == 0, output
    return job, job.result.read_bytes()


def test_a_job_whose_ranks_are_killed_ends_in_the_same_bits(
    untouched: tuple[Ranks, bytes], tmp_path: Path
) -> None:
    job, resumed = Ranks(tmp_path), []
    for seed, after_s in enumerate((0.8, 1.6)):
        code, output = job.run(kill_after_s=after_s, seed=seed)
        resumed += re.findall(r"^resumed from step (\d+)$", output, re.MULTILINE)
    code, output = job.run()
    assert code == 0, output
    last = re.findall(r"^resumed from step (\d+)$", output, re.MULTILINE)
    assert len(last) == 2 and len(set(last)) == 1, "both ranks resume from one step"
    assert int(last[0]) % EVERY == 0 and int(last[0]) > 0
    assert job.result.read_bytes() == untouched[1]


def test_a_job_goes_on_with_another_number_of_ranks(untouched: tuple[Ranks, bytes]) -> None:
    job = Ranks(untouched[0].folder, ranks=1)
    code, output = job.run()
    assert code == 0, output
    assert f"resumed from step {STEPS}" in output
    assert "private" in output, "it says what it could not restore"
