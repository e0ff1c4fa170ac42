"""Real DeepSpeed on CPU, 2 ranks: a directory for each save or engine, files of others, and two engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Options
from ckpt_deepspeed.roots import Roots
from tests.integrations.deepspeed.launch import Job, run

JOBS = (
    "rotated",
    "used_again",
    "by_turns",
    "shared_with_others",
    "remembered_otherwise",
    "in_the_way",
    "interrupted",
    "other_settings",
    "asked",
)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Job -> what each rank found."""
    place: Path = tmp_path_factory.mktemp("directories")
    jobs = [Job(f"directories.{name}", place / name) for name in JOBS]
    return dict(zip(JOBS, run(jobs, ranks=2, place=place / "jobs"), strict=True))


def test_a_save_to_a_new_directory_is_durable_when_it_returns(
    results: dict[str, list[Any]],
) -> None:
    for found in results["rotated"]:
        assert found["durable"] == [True] * 5
        assert found["resumed"]


def test_directories_that_are_saved_to_no_more_are_let_go_of(results: dict[str, list[Any]]) -> None:
    for found in results["rotated"]:
        assert found["open"] == [1, 2, 2, 2, 2]
        assert found["threads"][4] == found["threads"][1]


@pytest.mark.parametrize("way", ["fits", "short fits", "slots", "pair", "emptied"])
def test_a_save_to_a_directory_whose_name_was_used_before_is_durable_when_it_returns(
    results: dict[str, list[Any]], way: str
) -> None:
    for found in results["used_again"]:
        saves = found[way]
        assert saves and all(all(one) if isinstance(one, list) else one for one in saves), saves


def test_directories_of_trainers_never_count_as_saved_to_by_turns(
    results: dict[str, list[Any]],
) -> None:
    assert [found["open"] for found in results["used_again"]] == [2, 2]


def test_a_directory_that_is_saved_to_again_stays_open_beside_the_others(
    results: dict[str, list[Any]],
) -> None:
    for found in results["by_turns"]:
        assert found["opened"] == 3 + 1  # the first is closed for the third, and comes back
        assert found["latest"] == ["global_step4"] * 3 and found["whole"] == [True] * 6


def test_eight_directories_by_turns_stay_open_and_two_once_they_are_left(tmp_path: Path) -> None:
    roots, known = Roots(), []
    for name in [*"abcdefghi", *"abcdefghi", *"123456789"]:
        roots.trim(tmp_path / name)
        roots.of(tmp_path / name, Options(writers=1), per_node=False)
        known.append(len(roots._open))
    roots.close()
    assert known[:9] == [1, *[2] * 8]
    assert known[9:18] == [3, 4, 5, 6, 7, 8, 8, 8, 8]
    assert max(known) == 8 and known[-1] == 2


def test_a_link_that_is_pointed_elsewhere_leads_no_open_directory_there(tmp_path: Path) -> None:
    roots, link = Roots(), tmp_path / "current"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link.symlink_to("first")
    made = roots.of(link / "ck", Options(writers=1), per_node=False)
    link.unlink()
    link.symlink_to("second")
    assert not roots.has(link / "ck")
    assert roots.of(tmp_path / "first" / "ck", Options(writers=1), per_node=False) is made
    files = made.begin_files(1, "tag")
    files.add("one.pt", {"n": 1})
    assert files.seal().committed.result(60) == tmp_path / "first" / "ck" / "tag"
    assert not (tmp_path / "second" / "ck").exists()
    roots.close()


def test_files_of_others_in_a_tag_are_never_deleted(results: dict[str, list[Any]]) -> None:
    for found in results["shared_with_others"]:
        assert found["kept"] == [True, True, True]
        assert found["gone"] and found["whole"] and found["again"]


@pytest.mark.parametrize("way", ["save", "save, Fail", "load", "differing"])
def test_a_save_or_load_that_was_not_the_same_for_all_ranks_leaves_none_alone_in_a_later_save(
    results: dict[str, list[Any]], way: str
) -> None:
    found = [one[way] for one in results["remembered_otherwise"]]
    assert way == "differing" or any("no memory on this rank" in str(one["odd"]) for one in found)
    for one in found:
        assert one["told"] == [*[True] * 9, None], one
        assert one["latest"] == one["last"], one


def test_a_script_that_cannot_be_copied_holds_no_rank_up(results: dict[str, list[Any]]) -> None:
    assert results["in_the_way"] == ["global_step1"] * 2


def test_a_close_that_is_interrupted_can_be_called_again(results: dict[str, list[Any]]) -> None:
    for found in results["interrupted"]:
        assert found == ["interrupted", "global_step3", "global_step3"]


def test_two_engines_with_other_settings_do_not_share_a_directory(
    results: dict[str, list[Any]],
) -> None:
    for first, second in results["other_settings"]:
        assert first is True
        assert "ConfigError: checkpoint_engine.timeout=" in second and "is open with" in second


def test_a_look_for_a_tag_leaves_nothing_in_the_directory(results: dict[str, list[Any]]) -> None:
    for told, left in results["asked"]:
        assert "NotCommitted" in told and left == []
