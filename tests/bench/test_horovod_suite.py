"""The suite `horovod`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("horovod") is None and not os.environ.get("REQUIRE_INTEGRATIONS"):
    pytest.skip(
        "Horovod is not installed: docs/horovod.md#installing says how", allow_module_level=True
    )

from ckpt_core.bench import OURS
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.remote import ContenderFailed
from ckpt_core.bench.results import Report
from ckpt_core.bench.run import Run
from ckpt_core.system.machine import describe
from ckpt_horovod_tools.bench import HorovodSettings, pair
from ckpt_horovod_tools.bench.pair import Pair
from ckpt_horovod_tools.bench.suite import enter
from ckpt_horovod_tools.bench.ways import (
    BASE,
    IN_STEP,
    ITERATION,
    NAMES,
    NO_SPIN,
    SAVING,
    TORCH_SAVE,
    WAYS,
    WRITTEN,
    overhead,
)
from tests.bench.quick import assert_all_ran, quick_fixtures

INTERVALS = (1, 2)
SLICED = [name for name in SAVING if name != TORCH_SAVE]

pytestmark = pytest.mark.timeout(300)

output, report = quick_fixtures("--suite", "horovod")


def test_every_way_ran_and_says_what_it_is(report: dict[str, Any]) -> None:
    assert_all_ran(report, NAMES, framework="horovod")


def test_what_each_way_has_saved_is_the_live_state_of_that_step_on_both_ranks(
    report: dict[str, Any],
) -> None:
    assert all(report["contenders"][name]["restored"] for name in SAVING)


def test_all_ways_train_the_very_same_model(report: dict[str, Any]) -> None:
    assert len({report["contenders"][name]["digest"] for name in SAVING}) == 1


@pytest.mark.parametrize("every", INTERVALS)
def test_each_round_gives_the_time_of_each_way(report: dict[str, Any], every: int) -> None:
    rows = report["results"][ITERATION(every).key]["contenders"]
    assert list(rows) == list(NAMES)
    for row in rows.values():
        assert len(row["values"]) == report["settings"]["rounds"]
        assert 0 < row["min"] <= row["median"] <= row["max"]
    assert rows[OURS]["ratio_to_ours"] == 1


@pytest.mark.parametrize("every", INTERVALS)
@pytest.mark.parametrize("base", [BASE, NO_SPIN])
def test_overheads_are_over_the_base_of_the_same_round(
    report: dict[str, Any], every: int, base: str
) -> None:
    seconds = report["results"][ITERATION(every).key]["contenders"]
    overheads = report["results"][overhead(every, base).key]["contenders"]
    assert list(overheads) == list(SAVING)
    for name, row in overheads.items():
        pairs = zip(seconds[name]["values"], seconds[base]["values"], strict=True)
        assert row["values"] == pytest.approx([with_saves / none - 1 for with_saves, none in pairs])
        assert row["ratio_to_ours"] is None


@pytest.mark.parametrize("every", INTERVALS)
def test_a_stall_is_known_where_it_is_not_a_part_of_the_step(
    report: dict[str, Any], every: int
) -> None:
    rows = report["results"][f"train_stall_every_{every}"]["contenders"]
    assert list(rows) == [name for name in SAVING if name != IN_STEP]
    assert "step()" in report["contenders"][IN_STEP]["notes"][0]


def test_ranks_share_what_is_written_and_torch_save_has_one_writer(report: dict[str, Any]) -> None:
    found = [report["results"].get(WRITTEN(rank).key) for rank in (0, 1)]
    if None in found:
        pytest.skip("this filesystem does not count what is written")
    first, second = [rank["contenders"] for rank in found if rank is not None]
    # Small files: headers, manifests and the pages of directories count too.
    for name in SLICED:
        assert 0.49 < first[name]["min"] <= first[name]["max"] < 0.7
        assert 0.49 < second[name]["min"] <= second[name]["max"] < 0.7
    assert first[TORCH_SAVE]["min"] > 0.99
    assert second[TORCH_SAVE]["max"] < 0.2


def test_the_shortest_interval_is_told_over_both_bases(report: dict[str, Any]) -> None:
    found = report["frequency"]
    assert found["bound"] == 0.05
    assert list(found["ways"]) == list(SAVING)
    for rows in found["ways"].values():
        assert [row["base"] for row in rows] == [BASE, NO_SPIN]
        for row in rows:
            assert row["measured"] in (None, *INTERVALS)
            assert row["predicted"] >= 1


def test_the_report_names_the_size_that_was_measured(report: dict[str, Any]) -> None:
    settings = report["settings"]
    assert settings["leaves"] > 10
    assert abs(settings["state_bytes"] / (2 * 2**20) - 1) < 0.1


def test_tables_and_picture_are_written_and_the_root_is_left_as_it_was(
    output: Path, report: dict[str, Any]
) -> None:
    text = (output / "stdout").read_text()
    for words in (*NAMES, "Overhead over", "Stall of a save", "Shortest interval"):
        assert words in text
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((output / "root").iterdir())
    assert str(output) not in json.dumps(report)


def test_ours_is_the_default_of_the_integration() -> None:
    code = (
        "import inspect, ckpt_horovod\n"
        "known = inspect.signature(ckpt_horovod.DistributedOptimizer).parameters\n"
        "print(known['layerwise'].default)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == WAYS[OURS].layerwise


# -- ranks that fail ---------------------------------------------------------------------------


def asked(settings: HorovodSettings) -> dict[str, Any]:
    size = {"width": 32, "layers": 1, "vocabulary": 64, "batch": 1, "tokens": 8}
    return {"size": size, "staging_bytes": None, "timeout_s": settings.timeout_s}


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    settings = HorovodSettings(root=tmp_path, timeout_s=120.0)
    report = Report("horovod", {}, describe(tmp_path))
    run = Run(settings, report, tmp_path, lambda message: None)
    with Crew(run, Pair, shared=True) as crew:
        enter(run, crew)
        yield crew


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_way_whose_rank_dies_is_out_and_the_others_go_on_in_a_new_pair(
    crew: Crew, tmp_path: Path
) -> None:
    settings = HorovodSettings(root=tmp_path)
    pids = crew.team(OURS).pids
    os.kill(pids[1], signal.SIGKILL)
    assert crew.ask(OURS, "check", **asked(settings)) is None
    assert crew.report.entrants[OURS].failed
    assert not any(alive(pid) for pid in pids)
    assert OURS not in crew.names()
    answers = crew.ask(TORCH_SAVE, "check", **asked(settings))
    assert answers is not None
    assert len({answer["saved"] for answer in answers}) == 1
    assert not set(pids) & set(crew.team(TORCH_SAVE).pids)


def test_a_rank_that_raises_is_reported_with_its_words(crew: Crew, tmp_path: Path) -> None:
    settings = HorovodSettings(root=tmp_path)
    assert crew.ask(BASE, "check", **asked(settings)) is None
    assert "saves nothing" in str(crew.report.entrants[BASE].reason)


def test_no_process_is_left_when_the_pair_is_closed(tmp_path: Path) -> None:
    with Pair("all", tmp_path, 120.0) as ranks:
        pids = [*ranks.pids, ranks._launcher.pid]
        assert all(alive(pid) for pid in pids)
        ranks.close()
        ranks.close()
    assert not any(alive(pid) for pid in pids)


def test_a_launch_that_fails_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_MODULE", "ckpt_core.bench.nowhere")
    with pytest.raises(ContenderFailed, match=r"horovodrun ended at the start[\s\S]*nowhere"):
        Pair("all", tmp_path, 120.0)
