"""The example of Fabric, killed again and again, ends in the bits of a run that nobody touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Alone, check_killed_again_and_again

pytest.importorskip("lightning.fabric")

EXAMPLE = EXAMPLES / "fabric_gpt.py"
STEPS, EVERY, KILLS = 60, 4, 2


@pytest.fixture(scope="module", params=DEVICES)
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A run that nobody interrupts."""
    job = Alone(tmp_path_factory.mktemp("untouched"), EXAMPLE, STEPS, EVERY, device=request.param)
    run = job.run()
    assert run.returncode == 0, run.output
    assert run.resumed is None
    return job


@pytest.mark.timeout(900)  # four lives, each of which imports Lightning
def test_a_job_that_is_killed_again_and_again_ends_in_the_same_bits(
    untouched: Alone, tmp_path: Path
) -> None:
    job = Alone(tmp_path, EXAMPLE, STEPS, EVERY, device=untouched.device)
    check_killed_again_and_again(job, untouched, kills=KILLS, seed=7)


@pytest.mark.timeout(600)
def test_a_job_that_is_done_only_repeats_its_result(untouched: Alone) -> None:
    result = untouched.result.read_bytes()
    untouched.result.unlink()
    again = untouched.run()

    assert again.returncode == 0, again.output
    assert "step " not in again.output.replace("from step", "")
    assert untouched.result.read_bytes() == result


def test_the_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
