"""The example for several processes: any of them is killed, all start again, and the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, Torchrun, resumed_steps

STEPS, EVERY = 24, 3


def _job(folder: Path, *, ranks: int = 2) -> Torchrun:
    return Torchrun(folder, EXAMPLES / "ddp_gpt.py", STEPS, EVERY, ranks)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Torchrun, bytes]:
    """A run that nobody interrupts."""
    job = _job(tmp_path_factory.mktemp("untouched"))
    code, output = job.run()
    assert code == 0, output
    return job, job.result.read_bytes()


def test_a_job_whose_ranks_are_killed_ends_in_the_same_bits(
    untouched: tuple[Torchrun, bytes], tmp_path: Path
) -> None:
    job = _job(tmp_path)
    for seed in range(2):
        job.run(kill_after=1 + 2 * seed, seed=seed)
    code, output = job.run()
    assert code == 0, output
    last = resumed_steps(output)
    assert len(last) == 2 and len(set(last)) == 1, "both ranks resume from one step"
    assert last[0] % EVERY == 0 and last[0] > 0
    assert job.result.read_bytes() == untouched[1]


def test_a_job_goes_on_with_another_number_of_ranks(untouched: tuple[Torchrun, bytes]) -> None:
    job = _job(untouched[0].folder, ranks=1)
    code, output = job.run()
    assert code == 0, output
    assert f"resumed from step {STEPS}" in output
    assert "private" in output, "it says what it could not restore"
