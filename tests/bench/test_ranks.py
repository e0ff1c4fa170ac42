"""The suite `ranks`: one quick run for all tests of its output. No test looks at how long anything took."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench import OURS, RankMeasure, RankSettings
from ckpt_core.bench.ranks import NAMES
from ckpt_core.bench.ranks.suite import RankCrew
from ckpt_core.bench.results import Report
from ckpt_core.bench.run import Run
from ckpt_core.system.machine import describe
from tests.bench.forks import forked
from tests.bench.quick import broken_peers, ckpt_core_bench, quick_run, ran, report_of

SIZES = (2, 4)
SLICED = (OURS, "sharded_blocking")
ONE_WRITER = ("single", "torch_save_rank0")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ranks = [text for size in SIZES for text in ("--ranks", str(size))]
    return quick_run(tmp_path_factory.mktemp("bench"), "--suite", "ranks", *ranks)


@pytest.fixture(scope="module")
def report(output: Path) -> dict[str, Any]:
    return report_of(output)


def rank_bytes(report: dict[str, Any], ranks: int, name: str) -> list[int]:
    found: list[int] = report["rank_bytes"][str(ranks)][name]
    assert len(found) == ranks
    return found


def state_bytes(report: dict[str, Any], ranks: int) -> float:
    name = "replicated"
    share: float = report["results"][f"share_{ranks}_ranks"]["contenders"][name]["median"]
    return max(rank_bytes(report, ranks, name)) / share


def test_no_way_failed_but_of_a_known_bug_of_its_own_and_each_says_what_it_stands_for(
    report: dict[str, Any],
) -> None:
    assert list(report["contenders"]) == list(NAMES)
    for name, entry in report["contenders"].items():
        assert entry["reason"] is None or name in broken_peers(report) - {OURS}, entry["reason"]
        assert entry["version"] and entry["fsyncs"] and entry["settings"] and entry["notes"]
    assert report["contenders"][OURS]["notes"] == ["VELOC-Opt"]


def test_every_rank_restores_the_very_same_bytes_in_every_way(report: dict[str, Any]) -> None:
    entries = [report["contenders"][name] for name in ran(report)]
    assert all(entry["restored"] for entry in entries)
    assert len({entry["digest"] for entry in entries}) == 1


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", SLICED)
def test_no_rank_writes_more_than_its_share_and_one_percent(
    report: dict[str, Any], ranks: int, name: str
) -> None:
    replicated = state_bytes(report, ranks)
    sizes = rank_bytes(report, ranks, name)
    assert max(sizes) <= (1 / ranks + 0.01) * replicated
    assert sum(sizes) >= 0.99 * replicated


@pytest.mark.parametrize("ranks", SIZES)
def test_without_slices_one_rank_writes_everything_or_each_does(
    report: dict[str, Any], ranks: int
) -> None:
    replicated = state_bytes(report, ranks)
    for name in ONE_WRITER:
        first, *others = rank_bytes(report, ranks, name)
        assert first >= 0.99 * replicated
        assert not any(others)
    assert min(rank_bytes(report, ranks, "replicated")) >= 0.99 * replicated


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", SLICED)
def test_storage_sees_no_more_of_a_rank_than_its_share_either(
    report: dict[str, Any], ranks: int, name: str
) -> None:
    written = report["results"].get(f"written_{ranks}_ranks")
    if written is None:
        pytest.skip("this filesystem does not count what is written")
    # The kernel charges the rank that publishes for directories and inodes, too.
    slack = 128 * 2**10
    most = (1 / ranks + 0.01) * state_bytes(report, ranks) + slack
    assert written["contenders"][name]["max"] <= most


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("key", ["durable", "blocked", "slowdown_every_2", "train_stall_every_2"])
def test_each_round_gives_one_value_of_every_way(
    report: dict[str, Any], ranks: int, key: str
) -> None:
    ways = report["results"][f"{key}_{ranks}_ranks"]["contenders"]
    assert set(ways) == ran(report)
    for row in ways.values():
        assert len(row["values"]) == report["settings"]["rounds"]
        assert 0 <= row["min"] <= row["median"] <= row["max"]


def test_only_the_engine_knows_how_long_a_commit_takes(report: dict[str, Any]) -> None:
    ways = report["results"]["commit_2_ranks"]["contenders"]
    assert set(ways) == {OURS, "sharded_blocking", "single", "replicated"}


def test_every_plan_of_the_first_number_of_ranks_is_made(report: dict[str, Any]) -> None:
    rows = report["planning"]
    assert {(row["structure"], row["ranks"]) for row in rows} == {
        (name, ranks) for name in ("transformer", "small") for ranks in (64, 1000)
    }
    first = rows[0]
    assert (first["structure"], first["made"]) == ("transformer", 64)
    for row in rows:
        assert 0 < row["rank_s"] <= row["slowest_s"]
        assert row["peak_bytes"] > 0
        excess = (row["largest_share"] - 1) * row["state_bytes"] / row["ranks"]
        assert excess <= 0.01 * row["state_bytes"] + 128 * row["leaves"]


def test_simulated_commits_are_compared_with_real_ones(report: dict[str, Any]) -> None:
    found = report["messages"]
    assert [row["ranks"] for row in found["compared"]] == [2, 4]
    for row in found["compared"]:
        assert row["measured_s"] > 0
        assert row["simulated_s"] > 0
    assert {row["ranks"] for row in found["simulated"]} == {16, 256}
    assert found["store"]["messages_per_s"] > 0


def test_the_tables_show_every_way_and_the_picture_is_a_png(output: Path) -> None:
    text = (output / "stdout").read_text()
    for words in (*NAMES, "VELOC-Sharded", "Planning", "Simulated commits"):
        assert words in text
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")


def test_neither_a_path_nor_a_file_is_left(output: Path, report: dict[str, Any]) -> None:
    assert list((output / "root").iterdir()) == []
    assert str(output) not in json.dumps(report)


def test_a_way_whose_rank_dies_is_out_and_the_others_go_on_in_a_new_team(tmp_path: Path) -> None:
    names = (OURS, "torch_save_rank0", "single")
    settings = RankSettings(root=tmp_path, contenders=names, measures=(RankMeasure.SAVE,)).quick()
    report = Report("ranks", {}, describe(tmp_path))

    def notify(message: str) -> None:
        if "round 2" in message:
            os.kill(crew.team(OURS).pids[1], signal.SIGKILL)

    with forked(), RankCrew(Run(settings, report, tmp_path, notify), 2) as crew:
        crew.measure()
    failed = [name for name in names if report.entrants[name].failed]
    assert len(failed) == 1
    assert "rank-1: its process ended" in str(report.entrants[failed[0]].reason)
    for name in set(names) - set(failed):
        assert len(report.values["durable_2_ranks"][name]) == settings.rounds
        assert report.entrants[name].restored


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "2"], "--suite ranks"),
        (["--suite", "ranks", "--measure", "restore"], "choose of save"),
        (["--suite", "ranks", "--contender", "safetensors"], "safetensors"),
        (["--suite", "ranks", "--ranks", "0"], "at least 1"),
        (["--suite", "ranks", "--state-bytes", "1KiB"], "too small"),
        (["--suite", "ranks", "--state-bytes", "900TiB"], "free"),
    ],
)
def test_a_wrong_option_is_explained_before_anything_runs(
    arguments: list[str], text: str, tmp_path: Path
) -> None:
    result = ckpt_core_bench([*arguments, "--root", str(tmp_path)])
    assert result.exit_code == 2
    assert text in result.output
    assert list(tmp_path.iterdir()) == []
