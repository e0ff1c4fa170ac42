"""One quick run with every contender that is installed here. No test looks at how long anything took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench import NAMES, OURS
from ckpt_core.bench.contenders import SHARING
from tests.bench.quick import broken_peers, ckpt_core_bench, quick_run, ran, report_of

ALWAYS_HERE = {OURS, "torch_save", "torch_save_fsync", "dcp_save", "dcp_async_reused"}
STALLS = ("stall", "stall_call", "small_leaves_stall", "slowdown_every_1", "slowdown_every_2")
FOR_ALL_BUT_THE_DISK = (*STALLS, "restore_warm", "peak_memory", "train_stall_every_1")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_run(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def report(output: Path) -> dict[str, Any]:
    return report_of(output)


def test_every_contender_is_listed_and_says_whether_it_fsyncs_or_why_it_did_not_run(
    report: dict[str, Any],
) -> None:
    assert list(report["contenders"]) == list(NAMES)
    assert ran(report) | broken_peers(report) >= ALWAYS_HERE
    for entry in report["contenders"].values():
        assert entry["reason"] or (entry["fsyncs"] and entry["version"] and entry["settings"])


def test_what_it_does_is_told_beside_the_answer(output: Path) -> None:
    assert f"warm-up: {OURS}" in (output / "stderr").read_text()
    assert "warm-up" not in (output / "stdout").read_text()


def test_no_contender_failed_but_of_a_known_bug_of_its_own(report: dict[str, Any]) -> None:
    failed = {name: e["reason"] for name, e in report["contenders"].items() if e["failed"]}
    assert OURS not in failed
    assert failed.keys() == broken_peers(report), failed


def test_every_contender_restores_the_very_same_bytes(report: dict[str, Any]) -> None:
    entries = [report["contenders"][name] for name in ran(report) - {"raw_disk"}]
    assert all(entry["restored"] for entry in entries)
    assert len({entry["digest"] for entry in entries}) == 1


@pytest.mark.parametrize("key", FOR_ALL_BUT_THE_DISK)
def test_a_figure_is_there_for_every_contender_that_ran(report: dict[str, Any], key: str) -> None:
    assert set(report["results"][key]["contenders"]) == ran(report) - {"raw_disk"}


def test_throughput_is_there_for_the_disk_too(report: dict[str, Any]) -> None:
    assert set(report["results"]["persist"]["contenders"]) == ran(report)


def test_all_numbers_are_ordered_and_positive_unless_differences(report: dict[str, Any]) -> None:
    for key, result in report["results"].items():
        for name, row in result["contenders"].items():
            assert row["min"] <= row["median"] <= row["max"], (key, name)
            # Training with saves less training without: of two short runs, either may work longer.
            assert row["min"] > 0 or key.startswith("train_processor"), (key, name)
            assert row["min"] == min(row["values"])
            assert row["max"] == max(row["values"])


def test_ours_is_the_measure_of_all_ratios(report: dict[str, Any]) -> None:
    for result in report["results"].values():
        ours = result["contenders"][OURS]
        for row in result["contenders"].values():
            if min(ours["min"], row["min"]) < 0:
                assert row["ratio_to_ours"] is None
            else:
                assert row["ratio_to_ours"] == pytest.approx(row["median"] / ours["median"])


def test_each_round_gives_one_value(report: dict[str, Any]) -> None:
    for key in ("persist", "stall", "restore_warm", "slowdown_every_1"):
        for row in report["results"][key]["contenders"].values():
            assert len(row["values"]) == report["settings"]["rounds"]


def test_the_machine_is_described_without_a_name_or_a_path(
    report: dict[str, Any], output: Path
) -> None:
    assert set(report["machine"]) >= {
        "cpu",
        "cpus",
        "filesystem",
        "disk",
        "kernel",
        "torch",
        "date",
    }
    assert str(output) not in json.dumps(report)


def test_the_tables_show_every_contender(output: Path) -> None:
    text = (output / "stdout").read_text()
    for name in NAMES:
        assert name in text


def test_the_picture_is_a_png(output: Path) -> None:
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_left_on_the_disk(output: Path, report: dict[str, Any]) -> None:
    assert list((output / "root").iterdir()) == []


def test_a_start_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    names = (OURS, "torch_save", "dcp_save")
    asked = [word for name in names for word in ("--contender", name)]
    output = quick_run(tmp_path, "--measure", "start", *asked)
    results = report_of(output)["results"]
    assert results["start"]["contenders"].keys() == set(names)
    for name, row in results["start_own"]["contenders"].items():
        whole = results["start"]["contenders"][name]["values"]
        assert all(own < all_ for own, all_ in zip(row["values"], whole, strict=True))


def test_what_does_not_change_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    report = report_of(quick_run(tmp_path, "--measure", "still"))
    here = ran(report)
    assert list(report["contenders"]) == [OURS, *SHARING]
    assert here >= {OURS, *SHARING} - {"moonclip"}
    assert all(report["contenders"][name]["restored"] for name in here)
    assert len({report["contenders"][name]["digest"] for name in here}) == 1
    for key, figure in report["results"].items():
        looking = key.startswith("changing_")
        assert set(figure["contenders"]) == ({OURS, "ckpt_core_shared"} if looking else here), key
    written = report["results"]["still_written"]["contenders"]
    assert all(row["max"] < 0.1 for name, row in written.items() if name != OURS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--suite", "all"], "choose of core"),
        (["--measure", "joy"], "choose of save"),
        (["--contender", "nobody"], "nobody"),
        (["--state-bytes", "1KiB"], "too small"),
        (["--interval", "0"], "at least 1"),
        (["--root", "/nowhere"], "not an existing directory"),
        (["--json", "/nowhere/x.json"], "does not exist"),
        (["--plot", "x.txt"], ".png"),
    ],
)
def test_a_wrong_option_is_explained_before_anything_runs(arguments: list[str], text: str) -> None:
    result = ckpt_core_bench(arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_a_run_that_does_not_fit_on_the_disk_writes_nothing(tmp_path: Path) -> None:
    arguments = ["--root", str(tmp_path), "--contender", "torch_save", "--state-bytes", "900TiB"]
    result = ckpt_core_bench(arguments)
    assert result.exit_code == 2
    assert "free" in result.output
    assert list(tmp_path.iterdir()) == []


def test_the_command_loads_neither_torch_nor_the_benchmark_until_it_runs() -> None:
    code = "import sys, ckpt_core.cli.bench; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout
    assert "'ckpt_core.bench'" not in done.stdout
