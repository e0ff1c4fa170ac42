"""The Lightning example, killed again and again, ends in the bits of a run that nobody touched."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Job, Run

pytest.importorskip("lightning.pytorch")
pytest.importorskip("sklearn")

EXAMPLE = EXAMPLES / "lightning_digits.py"
STEPS, EVERY, KILLS = 60, 4, 2  # two and a half epochs


@dataclass(frozen=True)
class Digits(Job):
    """The job of this example."""

    def run(self, *, kill_after: int | None = None) -> Run:
        """The command, to its end; or until it has committed a step and told of so many losses since."""
        command = [sys.executable, str(EXAMPLE), *self.arguments(steps=STEPS, every=EVERY)]
        before, output, told = self._newest(), "", 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    output += line
                    told += line.startswith("step ") and self._newest() > before
                    if told == kill_after:
                        # No reading to the end: its workers hold the pipe until they miss it.
                        process.kill()
                        break
                process.wait()
            finally:
                process.kill()
        return Run(process.returncode, output)

    def _newest(self) -> str:
        """Name of the newest committed step; names ascend as steps do."""
        return max((path.name for path in self.root.glob("step-*")), default="")


@pytest.fixture(scope="module", params=DEVICES)
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """A run that nobody interrupts."""
    job = Digits(tmp_path_factory.mktemp("untouched"), device=request.param)
    run = job.run()
    assert run.returncode == 0, run.output
    assert run.resumed is None
    return job


@pytest.mark.timeout(900)  # four lives, each of which imports all of Lightning
def test_a_job_that_is_killed_again_and_again_ends_in_the_same_bits(
    untouched: Digits, tmp_path: Path
) -> None:
    job, dice = Digits(tmp_path, device=untouched.device), random.Random(3)
    resumed: list[int] = []
    for _ in range(KILLS):
        run = job.run(kill_after=dice.randint(1, 2))
        resumed += [] if run.resumed is None else [run.resumed]
        assert run.returncode in (-9, 0), run.output
    last = job.run()

    assert last.returncode == 0, last.output
    assert resumed, "a life that was killed after a commit is followed by one that resumes"
    assert resumed == sorted(resumed), "a restart never goes back behind an earlier one"
    assert all(step % EVERY == 0 for step in resumed)
    assert job.result.read_bytes() == untouched.result.read_bytes()


@pytest.mark.timeout(600)
def test_a_job_that_is_done_only_repeats_its_result(untouched: Digits) -> None:
    result = untouched.result.read_bytes()
    untouched.result.unlink()
    again = untouched.run()

    assert again.returncode == 0, again.output
    assert "step " not in again.output.replace("from step", "")
    assert untouched.result.read_bytes() == result


def test_the_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
