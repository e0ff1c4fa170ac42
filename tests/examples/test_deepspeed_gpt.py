"""The DeepSpeed example: a rank is killed, all start again, and the bits are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, Torchrun, resumed_steps

pytest.importorskip("deepspeed")

EXAMPLE = EXAMPLES / "deepspeed_gpt.py"
STEPS, EVERY = 24, 3


@pytest.mark.timeout(400)
def test_a_job_whose_ranks_are_killed_ends_in_the_same_bits(tmp_path: Path) -> None:
    untouched = Torchrun(tmp_path / "untouched", EXAMPLE, STEPS, EVERY)
    job = Torchrun(tmp_path / "killed", EXAMPLE, STEPS, EVERY)
    for each in (untouched, job):
        each.folder.mkdir()
    code, output = untouched.run()
    assert code == 0, output
    assert not resumed_steps(output)
    for seed in range(2):
        job.run(kill_after=1 + seed, seed=seed)
    code, output = job.run()
    assert code == 0, output
    last = resumed_steps(output)
    assert len(last) == 2 and len(set(last)) == 1, "both ranks resume from one step"
    assert last[0] % EVERY == 0 and last[0] > 0
    assert job.result.read_bytes() == untouched.result.read_bytes()


def test_the_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
