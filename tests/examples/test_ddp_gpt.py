"""The example for several processes: any of them is killed, all start again, and the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Ranks, check_killed_and_resumed

STEPS, EVERY = 16, 2


def _job(folder: Path, device: str, *, ranks: int = 2) -> Ranks:
    return Ranks(folder, EXAMPLES / "ddp_gpt.py", STEPS, EVERY, ranks, device=device)


@pytest.fixture(scope="module", params=DEVICES)
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """A run that nobody interrupts."""
    job = _job(tmp_path_factory.mktemp("untouched"), request.param)
    job.run_to_its_end()
    return job


def test_a_job_one_of_whose_ranks_is_killed_ends_in_the_same_bits(
    untouched: Ranks, tmp_path: Path
) -> None:
    check_killed_and_resumed(_job(tmp_path, untouched.device), untouched)


def test_a_job_goes_on_with_another_number_of_ranks(untouched: Ranks) -> None:
    output = _job(untouched.folder, untouched.device, ranks=1).run_to_its_end()
    assert f"resumed from step {STEPS}" in output
    assert "private" in output, "it says what it could not restore"
