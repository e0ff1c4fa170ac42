"""A real process is killed, run again, and ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import committed_steps
from tests import places
from tests.forks import Forks
from tests.integrations.lightning import killed_program
from tests.integrations.lightning.running import differences

HERE = Path(__file__).parents[3]
STEPS = killed_program.EPOCHS * killed_program.SAMPLES // killed_program.BATCH_SIZE


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How a run ends that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with warnings.catch_warnings(action="ignore"):
        return killed_program.run(folder / "root", folder / "log.txt")


@pytest.fixture
def program(forks: Forks, root: Path, tmp_path: Path) -> Program:
    return Program(forks, root, tmp_path / "log.txt", tmp_path / "last.pt")


class Program:
    """The script and its files."""

    def __init__(self, forks: Forks, root: Path, log: Path, last: Path) -> None:
        self._forks = forks
        self.root, self.log, self.last = root, log, last

    def run(self, *, kill_after: int | None = None, sign: int = signal.SIGKILL) -> int:
        """Run the script; send it a signal once it has begun so many training steps. Its exit code."""
        begun = self.lines()
        module = "tests.integrations.lightning.killed_program"
        process = self._forks.popen(
            [sys.executable, "-m", module, self.root, self.log, self.last], cwd=HERE
        )
        try:
            deadline = time.monotonic() + 120
            while kill_after is not None and len(self.lines()) - len(begun) < kill_after:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
            if kill_after is not None:
                process.send_signal(sign)
            return process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()

    def lines(self) -> list[str]:
        text = self.log.read_text() if self.log.exists() else ""
        return text.splitlines()

    def samples_of_steps(self) -> dict[int, tuple[int, list[int]]]:
        """Epoch and samples of each step, by the process that got furthest with it."""
        rows = (line.split() for line in self.lines())
        return {
            int(step): (int(epoch), [int(n) for n in ids.split(",")]) for epoch, step, ids in rows
        }


def test_a_process_killed_again_and_again_sees_each_sample_once_and_ends_bit_for_bit_the_same(
    program: Program, expected: dict[str, Any]
) -> None:
    rng = random.Random(places.run_number())
    for _ in range(2):
        assert program.run(kill_after=rng.randint(3, 12)) == -signal.SIGKILL
    assert program.run() == 0
    assert not differences(expected, torch.load(program.last, weights_only=False))
    steps = program.samples_of_steps()
    assert sorted(steps) == list(range(STEPS))
    for epoch in range(killed_program.EPOCHS):
        seen = [sample for at, ids in steps.values() if at == epoch for sample in ids]
        assert sorted(seen) == list(range(killed_program.SAMPLES))


def test_sigterm_saves_the_step_that_was_reached_and_nothing_is_done_twice(
    program: Program, expected: dict[str, Any]
) -> None:
    program.run(kill_after=7, sign=signal.SIGTERM)
    done = len(program.lines())
    assert committed_steps(program.root)[-1] == done
    assert program.run() == 0
    assert len(program.lines()) == STEPS
    assert not differences(expected, torch.load(program.last, weights_only=False))
