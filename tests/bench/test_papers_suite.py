"""The suite `papers`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.bench import PapersMeasure, PapersSettings
from ckpt_core.bench.papers import ways
from ckpt_core.bench.papers.found import (
    QUANTITIES,
    SLOWDOWN,
    Found,
    overhead_at,
    per_s,
    slowdown,
    smallest_interval,
)
from ckpt_core.bench.papers.job import Saver, StandIn
from ckpt_core.bench.papers.parts import PARTS, chosen
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.errors import ConfigError
from ckpt_core.options.presets import PRESETS
from ckpt_core.system.machine import describe
from tests.bench.quick import ckpt_core_bench, quick_run, report_of

pytestmark = pytest.mark.timeout(300)
PNG = b"\x89PNG"
WORKER = "ckpt_core.bench.papers.worker:PapersWorker"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One quick run; a directory on the same disk stands for the filesystem in memory."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "memory").mkdir()
    memory, out = str(folder / "memory"), str(folder / "figures")
    told = ("--suite", "papers", "--memory-root", memory, "--out", out)
    return quick_run(folder, *told, imported=["ckpt_core.bench.papers.job"])


@pytest.fixture(scope="module")
def report(output: Path) -> dict[str, Any]:
    return report_of(output)


def points(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in report["papers"].items():
        for row in part["rows"]:
            yield name, row


def test_every_part_ran_with_a_point_for_each_of_its_ways(report: dict[str, Any]) -> None:
    settings = PapersSettings(root=Path(), memory_root=Path()).quick()
    assert list(report["papers"]) == [str(part.measure) for part in PARTS]
    assert {part.measure for part in PARTS} == set(PapersMeasure)
    for part in PARTS:
        found = {row["line"] for row in report["papers"][part.measure]["rows"]}
        assert found - {ways.IDEAL} == {way.line for way in chosen(part, settings)}


def test_every_contender_is_there_and_every_way_restores_bit_for_bit(
    report: dict[str, Any],
) -> None:
    assert set(report["contenders"]) == set(ways.NAMES)
    for name, entry in report["contenders"].items():
        assert entry["reason"] is None, (name, entry["reason"])
        assert entry["restored"] is True and entry["settings"] and not entry["notes"]
    settings = PapersSettings(root=Path(), memory_root=Path()).quick()
    for part in PARTS:
        restored = report["papers"][part.measure]["restored"]
        assert set(restored) == {way.name for way in chosen(part, settings)}
        assert all(restored.values())


def test_points_have_a_positive_value_for_each_round_and_their_median_between_ends(
    report: dict[str, Any],
) -> None:
    for _, row in points(report):
        assert len(row["values"]) == report["settings"]["rounds"]
        assert row["quantity"] in QUANTITIES
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert (row["min"], row["max"]) == (min(row["values"]), max(row["values"]))


def test_throughput_has_every_interval_and_training_without_checkpoints(
    report: dict[str, Any],
) -> None:
    rows = report["papers"]["throughput"]["rows"]
    for line in (*ways.NAMES, ways.IDEAL):
        at = [row["x"] for row in rows if (row["line"], row["unit"]) == (line, "1/s")]
        assert at == report["settings"]["intervals"]


def test_values_stand_beside_the_papers(report: dict[str, Any]) -> None:
    compared = {name: part["comparison"] for name, part in report["papers"].items()}
    assert all(compared.values())
    rows = {row["what"]: row for row in compared["intervals"]}
    assert rows["lightcheck, disk: interval"]["paper"] == 64
    assert rows["checkfreq: interval"]["paper"] == 146
    assert compared["throughput"][0]["paper"] == 57
    assert [row["paper"] for row in compared["writers"]] == [1.36, 1.16]
    for part in compared.values():
        for row in part:
            assert row["ours"] > 0 and row["source"]


def test_each_figure_is_a_picture_and_a_file_of_its_points(
    output: Path, report: dict[str, Any]
) -> None:
    files = {path.name for path in (output / "figures").iterdir()}
    names = {part["file"] for part in report["papers"].values()}
    expected = {f"{name}{suffix}" for name in names for suffix in (".png", ".csv")}
    assert files == {*expected, "tables.md"}
    for part in report["papers"].values():
        assert (output / "figures" / f"{part['file']}.png").read_bytes().startswith(PNG)
        with (output / "figures" / f"{part['file']}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["median"]) for row in rows] == [row["median"] for row in part["rows"]]
        assert [row["line"] for row in rows] == [row["line"] for row in part["rows"]]


def test_tables_are_written_for_a_terminal_and_for_a_page_and_nothing_is_left_behind(
    output: Path, report: dict[str, Any]
) -> None:
    text, page = (output / "stdout").read_text(), (output / "figures" / "tables.md").read_text()
    for part in report["papers"].values():
        assert part["title"].split(",")[0] in text
        assert part["source"] in page
    for name in report["papers"]:
        assert f"\n## {name}\n" in page
    assert (output / "out.png").read_bytes().startswith(PNG)
    assert not list((output / "root").iterdir())
    assert not list((output / "memory").iterdir())
    assert str(output) not in page


# -- what blocks say ---------------------------------------------------------------------------


def test_throughput_counts_until_everything_is_durable() -> None:
    block = {"seconds": 5.0, "iterations": 20, "stalls_s": [0.1, 0.1]}
    assert per_s(block) == 4.0
    assert slowdown(block, 0.125) == 2.0


def test_values_of_rounds_come_together_in_one_point() -> None:
    found = Found()
    for value in (3.0, 1.0, 2.0):
        found.add(SLOWDOWN, "pccheck", 10, value)
    assert found.median(SLOWDOWN, "pccheck", 10) == 2.0
    assert found.median(SLOWDOWN, "pccheck", 11) is None
    assert [row.values for row in found.rows] == [(3.0, 1.0, 2.0)]


def test_the_interval_of_saves_that_always_cost_the_same() -> None:
    # A save costs 2 iterations wherever it is: 5 % of 40.
    assert smallest_interval(0.05, [(1, 2.0), (10, 0.2), (50, 0.04)]) == 40
    assert smallest_interval(0.05, [(1, 2.0)]) == 40


def test_the_interval_from_which_on_persisting_does_not_reach_into_the_next_one() -> None:
    # A save costs 20 iterations at an interval of 10, and nothing at 50: 10 at 30, 2.44 at 45.
    assert overhead_at(30, [(10, 2.0), (50, 0.0)]) == pytest.approx(10 / 30)
    assert smallest_interval(0.05, [(10, 2.0), (50, 0.0)]) == 46


def test_saves_that_cost_nothing_may_come_at_every_iteration() -> None:
    assert smallest_interval(0.05, [(1, 0.01), (10, -0.001)]) == 1


@given(
    bound=st.floats(0.01, 1.0),
    points=st.dictionaries(st.integers(1, 200), st.floats(-0.1, 20.0), min_size=1, max_size=4).map(
        lambda found: sorted(found.items())
    ),
)
def test_all_intervals_from_the_found_one_on_are_within_the_bound(
    bound: float, points: list[tuple[int, float]]
) -> None:
    found = smallest_interval(bound, points)
    last = max(found, points[-1][0])
    for interval in {found, *range(found, last + 1, max(1, (last - found) // 50)), last, 2 * last}:
        assert overhead_at(interval, points) <= bound
    assert found == 1 or overhead_at(found - 1, points) > bound


# -- the process that trains -------------------------------------------------------------------


def test_a_way_that_fails_says_why_and_the_process_goes_on_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "process").mkdir()
    request: dict[str, Any] = {"warm_ups": 0, "check": True, "timeout_s": 60.0}
    wrong = ways.Way(line="wrong", contender="pccheck", changes={"in_flight": 0})
    with Remote("p", tmp_path / "process", timeout_s=60.0, worker=WORKER) as process:
        process.call("build", state_bytes=2**20, leaves=4, iteration_s=0.001)
        failed = process.call("persist", way=wrong.to_json(), root=str(tmp_path / "a"), **request)
        assert "in_flight" in failed["failed"]
        right = ways.of_contender("gpm").to_json()
        done = process.call("persist", way=right, root=str(tmp_path / "b"), **request)
    assert done["restored"] is True
    assert done["seconds"] > 0 and done["newest_bytes"] > 2**20


class Forgetful(Saver):
    """Says that it has restored, and leaves the state as it was."""

    def restore(self) -> int | None:
        return None


def test_a_state_that_does_not_come_back_is_found() -> None:
    training = StandIn(state_bytes=2**16, leaves=4, iteration_s=0.001)
    assert not training.check(Forgetful())


# -- settings ----------------------------------------------------------------------------------


def test_every_way_names_a_preset_of_the_engine(tmp_path: Path) -> None:
    assert set(ways.PRESETS) == set(PRESETS)
    settings = PapersSettings(root=tmp_path, memory_root=tmp_path)
    for part in PARTS:
        names = [way.name for way in part.ways(settings)]
        assert len(names) == len(set(names))
        assert {way.contender for way in part.ways(settings)} <= set(ways.NAMES)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"contenders": ("dcp_save",)}, "unknown contenders"),
        ({"iteration_s": 0.0}, "iteration_s"),
        ({"max_overhead": 0.0}, "max_overhead"),
        ({"state_bytes": 10}, "state_bytes"),
        ({"sizes": (10,)}, "state_bytes=10"),
        ({"memory_states": (0.5,)}, "memory_states"),
        ({"memory_root": Path("/nowhere")}, "memory_root"),
        ({"intervals": ()}, "intervals"),
        ({"in_flight": (0,)}, "in_flight"),
        ({"rounds": 0}, "rounds"),
        ({"root": Path("/nowhere")}, "root"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PapersSettings(**{"root": tmp_path, **options})


def test_a_block_is_made_of_whole_intervals(tmp_path: Path) -> None:
    settings = PapersSettings(root=tmp_path, least=50, saves=4)
    intervals = (1, 13, 20, 25, 50, 100)
    assert [settings.saves_of(every, 2) for every in intervals] == [4, 4, 3, 2, 1, 1]
    assert [settings.saves_of(every, 6) for every in intervals] == [7, 4, 3, 2, 1, 1]


@pytest.mark.parametrize(
    ("suite", "more", "text"),
    [
        ("papers", ["--measure", "restore"], "choose of throughput, persist"),
        ("papers", ["--contender", "dcp_save"], "unknown contenders"),
        ("papers", ["--staging-bytes", "1GiB"], "--staging-bytes"),
        ("papers", ["--ranks", "2"], "--ranks"),
        ("papers", ["--out", "{root}/file"], "is a file"),
        ("papers", ["--out", "{root}/no/where"], "does not exist"),
        ("core", ["--iteration-s", "0.1"], "--iteration-s"),
        ("policy", ["--memory-root", "{root}"], "--memory-root"),
        ("ranks", ["--out", "{root}/out"], "--out"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(
    tmp_path: Path, suite: str, more: list[str], text: str
) -> None:
    (tmp_path / "file").touch()
    arguments = [argument.format(root=tmp_path) for argument in more]
    result = ckpt_core_bench(["--suite", suite, "--root", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert text in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("entrant", [Entrant(restored=False), Entrant(reason="x", failed=True)])
def test_a_preset_that_fails_or_restores_other_bytes_makes_the_run_fail(
    tmp_path: Path, entrant: Entrant
) -> None:
    report = Report("papers", {}, describe(tmp_path), ours=ways.PRESETS)
    report.entrants["gpm"] = Entrant(restored=True)
    assert report.sound
    report.entrants["pccheck"] = entrant
    assert not report.sound


def test_the_package_that_measures_imports_no_torch() -> None:
    code = "import sys, ckpt_core.bench.papers\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
