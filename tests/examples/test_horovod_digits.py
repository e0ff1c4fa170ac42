"""The Horovod example: a rank is killed, the job starts again, and ends in the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import (
    EXAMPLES,
    Ranks,
    check_killed_and_resumed,
    horovodrun,
    resumed_steps,
)

pytest.importorskip("horovod")
pytest.importorskip("sklearn")

EXAMPLE = EXAMPLES / "horovod_digits.py"
STEPS, EVERY = 90, 4  # nearly four epochs


def test_a_job_one_of_whose_ranks_is_killed_ends_in_the_same_bits(tmp_path: Path) -> None:
    untouched = Ranks(tmp_path / "untouched", EXAMPLE, STEPS, EVERY, launcher=horovodrun)
    job = Ranks(tmp_path / "killed", EXAMPLE, STEPS, EVERY, launcher=horovodrun)
    for each in (untouched, job):
        each.folder.mkdir()
    assert not resumed_steps(untouched.run_to_its_end())
    code = check_killed_and_resumed(job, untouched)
    assert code != 0, "a job one of whose ranks was killed does not end well"
