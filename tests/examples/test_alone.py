"""The examples of one process: killed again and again, each ends in the bits of a run that nobody touched."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Alone, check_killed_again_and_again
from tests.forks import Forks

KILLS = 2
STOPPED = 143
EVERY = 2

# A thread's first product may open CUDA's context, of which torch warns.
STRICT = ("-W", "error", "-W", "ignore:Attempting to run cuBLAS")


@dataclass(frozen=True)
class Example:
    """One that is run."""

    name: str
    steps: int
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    """What else forks of it have imported."""
    flags: tuple[str, ...] = ()
    begins: bool = True
    """When it is done, too; else its framework's loop ends before it begins."""


GPT = Example("train_gpt", 14, flags=STRICT)
TRAINED = {
    example.name: example
    for example in (
        GPT,
        Example("fabric_gpt", 14, ("lightning.fabric",), ("ckpt_lightning",)),
        # Two and a half epochs.
        Example(
            "lightning_digits",
            60,
            ("lightning.pytorch", "sklearn"),
            ("ckpt_lightning", "sklearn.datasets"),
            begins=False,
        ),
        Example("transformers_gpt", 40, ("transformers",), ("ckpt_transformers",)),
    )
}


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """What they train on."""
    return str(request.param)


@pytest.fixture(scope="module", params=TRAINED)
def untouched(
    request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Alone]:
    """A run that nobody interrupts, started as people do; what is compared with it may be forked."""
    example = TRAINED[request.param]
    for name in example.needs:
        pytest.importorskip(name)
    path = EXAMPLES / f"{example.name}.py"
    folder = tmp_path_factory.mktemp(example.name)
    job = Alone(folder, path, example.steps, EVERY, example.flags, device=device)
    assert job.run_to_its_end().resumed is None
    with Forks(*example.needs, *example.imports) as forks:
        # What a framework asks of CUDA as it is imported would keep forks from it.
        yield replace(job, forks=forks if device == "cpu" else None)


@pytest.mark.timeout(900)  # four lives, each of which imports all of a framework
def test_a_job_that_is_killed_again_and_again_ends_in_the_same_bits(
    untouched: Alone, tmp_path: Path
) -> None:
    job = replace(untouched, folder=tmp_path)
    check_killed_again_and_again(job, untouched, kills=KILLS, seed=3)


@pytest.mark.parametrize("untouched", [GPT.name], indirect=True)
def test_a_job_that_gets_sigterm_saves_the_step_it_is_in_and_resumes_there(
    untouched: Alone, tmp_path: Path
) -> None:
    job = replace(untouched, folder=tmp_path)
    first = job.run(until=lambda line: line == "training\n", sent=signal.SIGTERM)
    stopped = re.search(r"^stopped at step (\d+)$", first.output, re.MULTILINE)
    assert first.returncode == STOPPED, first.output
    assert stopped is not None, first.output
    assert not job.result.exists()
    assert job.run_to_its_end().resumed == int(stopped[1])
    assert job.result.read_bytes() == untouched.result.read_bytes()


@pytest.mark.timeout(600)
def test_a_job_that_is_done_only_repeats_its_result(untouched: Alone) -> None:
    result = untouched.result.read_bytes()
    untouched.result.unlink()
    again = untouched.run_to_its_end()
    begins = TRAINED[untouched.example.stem].begins
    assert again.resumed == (untouched.steps if begins else None)
    assert "step " not in again.output.replace("from step", "")
    assert untouched.result.read_bytes() == result


@pytest.mark.parametrize("untouched", [GPT.name], indirect=True)
def test_a_job_that_is_asked_for_fewer_steps_than_it_has_tells_the_step_of_its_bits(
    untouched: Alone,
) -> None:
    result = untouched.result.read_bytes()
    assert replace(untouched, steps=EVERY).run_to_its_end().resumed == untouched.steps
    assert untouched.result.read_bytes() == result


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_examples_are_short_enough_to_read(name: str) -> None:
    most = 80 if name != "common" else 110
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most
