"""A job of two ranks is killed and loses its disk; the same command goes on from the level, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core import Level, Options, committed_steps
from ckpt_horovod.elastic_settings import Settings
from tests.examples.runs import EXAMPLES, Ranks, horovodrun, resumed_steps
from tests.levels.trainers import end_agent, wait_for_agent

pytest.importorskip("sklearn")

EXAMPLE = EXAMPLES / "horovod_digits.py"
STEPS, EVERY = 16, 2


def job_in(folder: Path) -> Ranks:
    folder.mkdir()
    return Ranks(folder, EXAMPLE, STEPS, EVERY, launcher=horovodrun)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Ranks]:
    """One whose agent ends with the test."""
    made = job_in(tmp_path / "killed")
    yield made
    end_agent(made.root)


def test_an_elastic_state_takes_levels_of_its_options_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings(tmp_path).options is None
    monkeypatch.setenv("CKPT_CORE_LEVELS", '["/environment"]')
    for given, url in ((None, "/environment"), (Options(levels=["/options"]), "/options")):
        options = Settings(tmp_path, given).options
        assert options is not None and options.levels == (Level(url),)


@pytest.mark.timeout(500)
def test_a_job_that_loses_its_disk_goes_on_from_the_level(
    job: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched, far = job_in(tmp_path / "untouched"), tmp_path / "far"
    untouched.run_to_its_end()
    monkeypatch.setenv("CKPT_CORE_LEVELS", json.dumps([{"url": str(far), "every": 4}]))
    job.run(kill_after=2)
    wait_for_agent(job.root)
    newest = committed_steps(far)[-1]
    assert newest == committed_steps(job.root)[-1], "the agent outlives the job"
    shutil.rmtree(job.root)
    output = job.run_to_its_end()
    assert resumed_steps(output) == [newest] * 2
    assert job.result.read_bytes() == untouched.result.read_bytes()
