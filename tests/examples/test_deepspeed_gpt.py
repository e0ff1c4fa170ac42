"""The DeepSpeed example: a rank is killed, all start again, and the bits are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import (
    DEVICES,
    EXAMPLES,
    Ranks,
    check_killed_and_resumed,
    resumed_steps,
)

pytest.importorskip("deepspeed")

EXAMPLE = EXAMPLES / "deepspeed_gpt.py"
STEPS, EVERY = 8, 2  # of bfloat16, which takes a CPU long


@pytest.mark.timeout(400)
@pytest.mark.parametrize("device", DEVICES)
def test_a_job_one_of_whose_ranks_is_killed_ends_in_the_same_bits(
    tmp_path: Path, device: str
) -> None:
    ranks = 2 if device == "cpu" else 1  # NCCL wants a device for each
    untouched = Ranks(tmp_path / "untouched", EXAMPLE, STEPS, EVERY, ranks, device=device)
    job = Ranks(tmp_path / "killed", EXAMPLE, STEPS, EVERY, ranks, device=device)
    for each in (untouched, job):
        each.folder.mkdir()
    assert not resumed_steps(untouched.run_to_its_end())
    check_killed_and_resumed(job, untouched)
