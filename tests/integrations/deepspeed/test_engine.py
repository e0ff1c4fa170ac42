"""Real DeepSpeed on CPU, 1 and 2 ranks: what is saved is what training had, and DeepSpeed itself reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.deepspeed.launch import Job, run

MATRIX = [(zero, dtype) for zero in range(4) for dtype in ("bf16", "fp32")]
OTHERS = (
    "tools",
    "arguments",
    "client_state",
    "damaged",
    "failing",
    "late",
    "untrained",
    "scripts",
    "apart",
)
RESTLESS = [(zero, most) for zero in (0, 2) for most in (1 << 20, 0)]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, Any]:
    """Every job of this module, run in one launch: key -> result of each rank."""
    place: Path = tmp_path_factory.mktemp("deepspeed")
    keys: list[Any] = [("exact", zero, dtype) for zero, dtype in MATRIX]
    jobs = [
        Job("exact", place / f"exact{zero}{dtype}", {"zero": zero, "dtype": dtype})
        for zero, dtype in MATRIX
    ]
    for name in OTHERS:
        stages = [2, 3] if name == "tools" else [None]
        for stage in stages:
            keys.append(name if stage is None else (name, stage))
            arguments = {} if stage is None else {"zero": stage}
            jobs.append(Job(name, place / f"{name}{stage}", arguments))
    for zero, most in RESTLESS:
        keys.append(("restless", zero, most))
        jobs.append(Job("restless", place / f"{zero}{most}", {"zero": zero, "most": most}))
    found = run(jobs, ranks=request.param, place=place / "jobs")
    return dict(zip(keys, found, strict=True))


@pytest.mark.parametrize(("zero", "dtype"), MATRIX)
def test_training_goes_on_bit_for_bit_with_either_engine(
    results: dict[Any, Any], zero: int, dtype: str
) -> None:
    for found in results["exact", zero, dtype]:
        assert found["engine"] == "CkptCoreEngine" and found["preset"]
        assert found["latest"] == "global_step5"
        assert found["whole"] == [True] * 5
        ends = {found[key] for key in found if key.endswith("end") or "_from_" in key}
        assert len(ends) == 1, found


@pytest.mark.parametrize("zero", [2, 3])
def test_deepspeeds_own_reader_waits_for_the_save_and_reads_it(
    results: dict[Any, Any], zero: int
) -> None:
    for found in results["tools", zero]:
        assert found["names"]
        assert found["same"]


def test_tags_latest_and_partial_loads_keep_their_meaning(results: dict[Any, Any]) -> None:
    for found in results["arguments"]:
        assert found["latest"] == "best"
        assert found["tags"] == ["aside", "best"]
        assert found["note"] == "second" and not found["left"]
        assert found["seen"] == 2


def test_what_may_change_at_once_is_saved_as_it_was(results: dict[Any, Any]) -> None:
    for found in results["client_state"]:
        assert found == {"tensor": 500_000, "deep": 500_000, "seen": 1}


@pytest.mark.parametrize(("zero", "most"), RESTLESS)
def test_what_a_forward_pass_changes_is_saved_as_it_was(
    results: dict[Any, Any], zero: int, most: int
) -> None:
    for found in results["restless", zero, most]:
        assert found == {"values": [[2.0], [2.0]], "latest": "global_step2"}


def test_a_damaged_tag_is_refused_and_the_newest_whole_one_offered(results: dict[Any, Any]) -> None:
    for rank, found in enumerate(results["damaged"]):
        assert found["path"] and found["step"] == 2, found
        assert "/global_step2/" in found["path"], found
        assert "global_step3" in found["refused"] and "'global_step2'" in found["refused"]
        assert len(found["told"]) == (rank == 0)
        assert found["then"]["step"] == 1, found
        for text in found["then"]["told"]:
            assert "tag 'global_step3'" in text and "tag 'global_step2' is damaged too: " in text


def test_a_save_that_fails_is_reported_and_a_later_one_works(results: dict[Any, Any]) -> None:
    for found in results["failing"]:
        assert found["problems"], "nobody was told"
        assert found["latest"] == "global_step4"


def test_a_key_that_came_too_late_is_told_once_at_the_first_save(results: dict[Any, Any]) -> None:
    for found in results["late"]:
        assert len(found) == 1 and "TorchCheckpointEngine" in found[0] and "attach(" in found[0]


def test_what_deepspeed_cannot_save_is_refused_on_all_ranks(results: dict[Any, Any]) -> None:
    for found in results["untrained"]:
        for told in found["told"]:
            assert "ConfigError: ZeRO 3 without an optimizer" in told
        assert found["same"] and not found["left"]


def test_scripts_that_are_there_are_not_copied_again(results: dict[Any, Any]) -> None:
    for found in results["scripts"]:
        assert all(found.values()), found


def test_no_rank_waits_in_a_barrier_of_deepspeed_for_another_ones_pickling(
    results: dict[Any, Any],
) -> None:
    for found in results["apart"]:
        # Looked through for tensors, and pickled, behind the last one.
        assert found == [2, 2]
