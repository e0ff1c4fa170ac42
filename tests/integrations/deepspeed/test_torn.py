"""Damaged tags, and a `latest` that is wrong: what is loaded instead, and what is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.deepspeed.conftest import Ranks

BEFORE, NEWEST = "global_step2", "global_step3"


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def found(
    request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Job -> what each rank found."""
    place: Path = tmp_path_factory.mktemp("torn")
    results = {}
    for job in ("torn", "pointed", "others", "aside"):
        outcomes = ranks(f"torn_jobs.{job}", ranks=request.param, folder=str(place / job))
        for rank, outcome in enumerate(outcomes):
            assert not outcome["problem"] and outcome["code"] == 0, (job, rank, outcome)
        results[job] = [outcome["result"] for outcome in outcomes]
    return results


def test_whatever_happens_to_one_file_the_newest_whole_tag_is_loaded_with_a_warning(
    found: dict[str, list[Any]],
) -> None:
    count = len(found["torn"])
    for rank, cases in enumerate(found["torn"]):
        # Model, manifest, and for each rank its optimizer and its own manifest, in seven ways.
        assert len(cases) == 7 * (2 + 2 * count)
        for name, (loaded, _) in cases.items():
            assert (loaded["tag"], loaded["step"], loaded["steps"]) == (BEFORE, 2, 2), name
            assert not loaded["problem"], name
            assert len(loaded["told"]) == (rank == 0), name
            if rank == 0:
                (text,) = loaded["told"]
                assert f"tag {NEWEST!r}" in text and f"Loading {BEFORE!r} instead" in text


def test_a_damaged_tag_that_is_asked_for_is_refused_and_the_newest_whole_one_named(
    found: dict[str, list[Any]],
) -> None:
    for cases in found["torn"]:
        for name, (_, asked) in cases.items():
            assert asked["problem"].startswith("CorruptCheckpoint"), name
            assert f"the newest whole tag is {BEFORE!r}" in asked["problem"], name
            assert asked["untouched"], name


def test_a_latest_that_names_no_tag_is_passed_over_with_a_warning(
    found: dict[str, list[Any]],
) -> None:
    for rank, cases in enumerate(found["pointed"]):
        assert len(cases) == 9
        for name, loaded in cases.items():
            assert (loaded["tag"], loaded["step"], loaded["problem"]) == (NEWEST, 3, ""), name
            assert len(loaded["told"]) == (rank == 0), name
            if rank == 0:
                assert "latest" in loaded["told"][0]
                assert f"Loading {NEWEST!r} instead" in loaded["told"][0]


def test_tags_of_plain_deepspeed_load_as_they_are(found: dict[str, list[Any]]) -> None:
    for cases in found["others"]:
        for name in ("plain is the newest", "plain by its tag"):
            assert cases[name]["tag"] == "plain" and cases[name]["step"] == 2
            assert not cases[name]["told"] and not cases[name]["problem"]
        assert cases["the newest by its tag"]["tag"] == NEWEST


def test_two_torn_tags_are_passed_over(found: dict[str, list[Any]]) -> None:
    for cases in found["others"]:
        assert cases["two are torn"]["tag"] == "global_step1"
        for text in cases["two are torn"]["told"]:
            assert f"tag {NEWEST!r}" in text and f"tag {BEFORE!r}" in text


def test_a_tag_that_latest_was_not_to_name_is_loaded_only_if_no_other_is_whole(
    found: dict[str, list[Any]],
) -> None:
    for rank, cases in enumerate(found["aside"]):
        assert cases["the newest is torn"]["tag"] == "global_step1", cases
        assert cases["no latest"]["tag"] == BEFORE, cases
        assert cases["no other is whole"]["tag"] == "export", cases
        told = [text for loaded in cases.values() for text in loaded["told"]]
        assert ["was never to name it" in text for text in told] == [False, False, True] * (
            rank == 0
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing is whole", "CorruptCheckpoint.*No other tag of this engine is whole"),
        ("nothing is whole, by its tag", "CorruptCheckpoint.*no other tag is whole"),
        ("nothing is whole, and no latest", "CorruptCheckpoint.*has no file 'latest'"),
        ("no such tag", "NotCommitted.*'global_step9'.*the newest whole tag is 'global_step3'"),
    ],
)
def test_where_nothing_can_be_loaded_it_is_said_on_all_ranks_and_nothing_is_changed(
    found: dict[str, list[Any]], name: str, says: str
) -> None:
    for cases in found["others"]:
        loaded = cases[name]
        assert re.search(says, loaded["problem"]), loaded
        assert loaded["untouched"] and loaded["tag"] is None


@pytest.mark.parametrize(
    "name", ["nothing but plain, and no latest", "nothing at all", "no directory"]
)
def test_a_first_start_finds_nothing_as_with_plain_deepspeed(
    found: dict[str, list[Any]], name: str
) -> None:
    for cases in found["others"]:
        loaded = cases[name]
        assert loaded["tag"] is None and not loaded["problem"] and not loaded["told"]
