"""A full disk, failing writes, a rank that raises or is lost: who is told, when, and what is there then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.mounts import mounted
from tests.integrations.deepspeed.conftest import Ranks

KINDS = {
    "EIO": "Input/output error",
    "end of the thread": "ended by SystemExit",
    "hang": "given up after|has not voted in time",
}


def results(outcomes: list[dict[str, Any]]) -> list[Any]:
    """What each rank found, once it is sure that all ended well."""
    for outcome in outcomes:
        assert outcome["code"] == 0 and not outcome["problem"], outcome
    return [outcome["result"] for outcome in outcomes]


def test_a_full_disk_is_told_by_the_next_save_on_all_ranks_and_then_saving_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        for found in results(ranks("failing_jobs.full_disk", root=str(disk / "ckpts"))):
            first, second, third, fourth = found["raised"]
            assert not first and not second and not fourth
            assert "has 0 B free" in third or "No space left" in third
            assert found["during"] == {"whole": {"global_step1": True}, "latest": "global_step1"}
            assert found["after"]["latest"] == "global_step4"
            assert found["after"]["whole"] == {"global_step1": True, "global_step4": True}


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_is_raised_by_the_next_save_or_by_close_on_all_ranks(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    root = str(tmp_path / "ckpts")
    outcomes = ranks("failing_jobs.failing_write", root=root, kind=kind, on_error="raise")
    for rank, found in enumerate(results(outcomes)):
        *saves, closing = found["raised"]
        # The second save fails, and the last one: the third one tells, and `close`.
        assert [bool(text) for text in saves] == [False, False, True, False, False]
        for text, step in ((saves[2], 2), (closing, 5)):
            assert any(part in text for part in KINDS[kind].split("|")), text
            assert rank == 1 or (f"step {step}" in text and "rank 1" in text)
        assert found["latest"] == "global_step4"
        assert found["whole"] == {"global_step1": True, "global_step4": True}


@pytest.mark.parametrize("kind", KINDS)
def test_with_on_error_warn_it_is_logged_and_no_other_save_is_lost(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    root = str(tmp_path / "ckpts")
    outcomes = ranks("failing_jobs.failing_write", root=root, kind=kind, on_error="warn")
    for found in results(outcomes):
        assert not any(found["raised"])
        assert len([text for text in found["logged"] if "save of step" in text]) == 2
        assert found["latest"] == "global_step4"
        assert set(found["whole"]) == {"global_step1", "global_step3", "global_step4"}


def test_a_rank_that_is_lost_after_a_save_is_told_by_wait_within_the_timeout(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, lost = ranks("failing_jobs.lost_rank", root=str(tmp_path / "ckpts"))
    assert lost["signal"] == 9
    (found,) = results([first])
    waited, saved, closed = found["raised"]
    assert waited.startswith("CoordinationTimeout") and "rank 1" in waited
    assert "Connection" in saved, "Gloo's own error, in the barrier with which DeepSpeed begins"
    assert not closed
    assert found["took_s"] < 60
    assert found["latest"] == "global_step1" and found["whole"] == {"global_step1": True}


@pytest.fixture(scope="module")
def raising(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found where ranks raise, or mean different tags."""
    root = tmp_path_factory.mktemp("raising") / "ckpts"
    return results(ranks("failing_jobs.raising", root=str(root)))


def test_a_rank_that_raises_in_a_save_fails_it_for_all_and_the_next_one_works(
    raising: list[Any],
) -> None:
    first, second = raising
    for mine, other in zip(first[:3], second[:3], strict=True):
        assert mine["there"] == other["there"] == [False, True, True], mine
        interrupted = mine["name"] == "interrupted on all"
        assert mine["raised"][0].startswith("KeyboardInterrupt" if interrupted else "ConfigError")
        assert bool(other["raised"][0]) == interrupted
        # It was raised to a caller: nobody is told again, and no other save is lost.
        assert not any([*mine["raised"][1:], *other["raised"][1:]])
    assert first[0]["raised"][0].startswith("ConfigError: odd: ")
    assert first[4]["latest"] == "2-12" and all(first[4]["whole"].values())


@pytest.mark.parametrize("zero", [1, 3])
def test_a_rank_that_raises_in_deepspeeds_own_part_keeps_no_other_waiting(
    ranks: Ranks, tmp_path: Path, zero: int
) -> None:
    root = str(tmp_path / "ckpts")
    for rank, found in enumerate(
        results(ranks("failing_jobs.raising_inside", root=root, zero=zero))
    ):
        own = "AssertionError: out of memory" if rank == 1 else ""
        assert found["raised"] == ["", own, "", ""]
        assert found["latest"] == "global_step4"
        assert found["whole"] == {f"global_step{step}": True for step in (1, 3, 4)}


def test_ranks_that_mean_different_tags_save_to_that_of_the_first_one(raising: list[Any]) -> None:
    for rank, (*_, found, left) in enumerate(raising):
        assert found["name"] == "different tags"
        assert found["there"] == [rank == 0, True, True]
        assert not any(found["raised"])
        assert [tag for tag in left["whole"] if "-of-" in tag] == ["0-10-of-0"]


def test_a_failure_that_only_one_rank_has_to_tell_is_raised_on_all_before_a_load(
    ranks: Ranks, tmp_path: Path
) -> None:
    root = str(tmp_path / "ckpts")
    first, second = results(ranks("failing_jobs.loads_after_a_failure", root=root))
    assert first[0].startswith("CommitError")
    assert first[1].startswith("RestoreError: rank 1: ") and "Input/output error" in first[1]
    assert second[0].startswith("PersistError")
    assert not first[2] and not second[1]


def test_a_reader_on_one_rank_leaves_a_failure_for_all_ranks_to_be_told(
    ranks: Ranks, tmp_path: Path
) -> None:
    root = str(tmp_path / "ckpts")
    for found in results(ranks("failing_jobs.reads_after_a_failure", root=root)):
        assert not found["read"]
        assert [bool(text) for text in found["raised"]] == [False, False, True, False, False]


def test_a_lack_of_threads_on_one_rank_is_no_damage_of_any_tag(
    ranks: Ranks, tmp_path: Path
) -> None:
    root = str(tmp_path / "ckpts")
    for raised, loaded in results(ranks("failing_jobs.loads_without_threads", root=root)):
        assert "can't start new thread" in raised and "damaged" not in raised, raised
        assert loaded == "global_step2"


def test_a_load_that_is_interrupted_anywhere_leaves_later_reads_to_name_their_tag(
    ranks: Ranks, tmp_path: Path
) -> None:
    root = str(tmp_path / "ckpts")
    (found,) = results(ranks("failing_jobs.interrupted_loads", ranks=1, root=root))
    assert found["count"] > 50 and not found["left"], found


def test_a_save_that_is_interrupted_anywhere_is_given_up_or_sealed_and_leaves_nothing_open(
    ranks: Ranks, tmp_path: Path
) -> None:
    root = str(tmp_path / "ckpts")
    (found,) = results(ranks("failing_jobs.interrupted_saves", ranks=1, root=root))
    assert found["count"] > 300 and min(found["cleaned"]) > 0, found
    assert not found["left"] and found["loaded"] == "next", found


def test_a_fork_of_a_rank_does_not_wait_for_what_only_the_rank_can_finish(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in results(ranks("failing_jobs.forked", root=str(tmp_path / "ckpts"))):
        assert found["code"] == 0 and not found["there"]
        assert found["latest"] == "global_step1" and found["whole"] == {"global_step1": True}


def test_a_directory_that_cannot_be_made_is_told_by_the_save_itself_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in results(ranks("failing_jobs.unwritable", root=str(tmp_path / "file"))):
        assert len(found) == 2 and all("could not open" in text for text in found), found
