"""The example for several processes: any of them is killed, all start again, and the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Ranks, check_killed_and_resumed
from tests.forks import Forks

STEPS, EVERY = 10, 2


@pytest.fixture(scope="module", params=DEVICES)
def untouched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """A run that nobody interrupts; the launchers of later ones are forked."""
    folder = tmp_path_factory.mktemp("untouched")
    job = Ranks(folder, EXAMPLES / "ddp_gpt.py", STEPS, EVERY, device=request.param)
    job.run_to_its_end()
    with Forks("torch.distributed.run") as forks:
        yield replace(job, forks=forks)


def test_a_job_one_of_whose_ranks_is_killed_ends_in_the_same_bits(
    untouched: Ranks, tmp_path: Path
) -> None:
    check_killed_and_resumed(replace(untouched, folder=tmp_path), untouched)


def test_a_job_goes_on_with_another_number_of_ranks(untouched: Ranks) -> None:
    output = replace(untouched, ranks=1).run_to_its_end()
    assert f"resumed from step {STEPS}" in output
    assert "private" in output, "it says what it could not restore"
