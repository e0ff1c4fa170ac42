"""A node is lost with its disk: real ranks on a fresh one bring the newest tag from the level, and go on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.deepspeed.launch import Job, run, torchrun
from tests.levels.trainers import end_agent

pytestmark = pytest.mark.timeout(600)

AT = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Name of a job -> result of each rank."""
    place: Path = tmp_path_factory.mktemp("levels")
    folder, jobs = place / "run", place / "jobs"
    jobs.mkdir()
    (jobs / "plan.json").write_text(f'[["level_jobs.killed", "{folder}", {{}}]]')
    program = ["-m", "tests.integrations.deepspeed.program", str(jobs)]
    code, output = torchrun(program, ranks=2)
    assert code != 0, output
    end_agent(folder / "c")
    left = {path.name for path in (folder / "far").iterdir()}
    assert {"latest", f"global_step{AT}"} <= left, output
    shutil.rmtree(folder / "c")
    try:
        names = ["resumed", "nothing"]
        jobs_of = {"resumed": folder, "nothing": place / "fresh"}
        plan = [Job(f"level_jobs.{name}", jobs_of[name]) for name in names]
        return dict(zip(names, run(plan, ranks=2, place=place / "again"), strict=True))
    finally:
        end_agent(folder / "c")


def test_ranks_with_an_empty_directory_go_on_from_the_level_bit_for_bit(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for found in results["resumed"]:
        assert found["step"] == AT and found["latest"] == f"global_step{AT}"
        assert found["resumed_end"] == found["end"]
        assert found["told"] == [], "nothing was wrong with an empty directory"


def test_a_damaged_tag_that_is_asked_for_is_brought_again(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    assert results["resumed"][0]["damaged"]
    for found in results["resumed"]:
        assert found["whole"] and found["mended_end"] == found["end"]


def test_plain_deepspeed_loads_a_level_that_is_a_directory(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for found in results["resumed"]:
        assert found["plain_end"] == found["end"]


def test_where_nothing_is_anywhere_training_begins_anew(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for found in results["nothing"]:
        assert found["path"] is None
        assert "no level can hold them together" in found["refused"]
