"""The suite `deepspeed`: one quick run for all tests of its output. Nothing is asserted about times.

Each way costs two processes at each stage, so one of each kind runs: ours, one that fsyncs, one that
cannot run on a CPU, the one that is patched, and none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

if find_spec("deepspeed") is None and not os.environ.get("REQUIRE_INTEGRATIONS"):
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

from ckpt_core.bench import OURS
from ckpt_core.bench.results import Figure, Report
from ckpt_core.bench.run import Run
from ckpt_core.system.machine import describe
from ckpt_deepspeed_tools.bench import DeepSpeedSettings, ways
from ckpt_deepspeed_tools.bench.crew import LAUNCH, StageCrew
from ckpt_deepspeed_tools.bench.ways import (
    BASE,
    DECOUPLED,
    DECOUPLED_PATCHED,
    FAST,
    RANKS,
    TORCH_FSYNC,
)
from tests.bench.forks import forked
from tests.bench.quick import quick_fixtures

INTERVALS = (1, 2)
STAGES = (1, 3)
CHOSEN = (OURS, TORCH_FSYNC, FAST, DECOUPLED_PATCHED)
RUNNING = [name for name in CHOSEN if name != FAST]
SHARED_MEMORY = Path("/dev/shm")
SIZE = {"width": 32, "layers": 1, "vocabulary": 64, "batch": 1, "tokens": 8}

pytestmark = pytest.mark.timeout(400)

_options = [option for name in CHOSEN for option in ("--contender", name)]
IMPORTED = (
    "ckpt_deepspeed",
    "ckpt_deepspeed_tools.bench.saving",
    "ckpt_deepspeed_tools.bench.training",
)
output, report = quick_fixtures("--suite", "deepspeed", *_options, imported=IMPORTED)

by_stage = pytest.mark.parametrize("stage", STAGES)


def rows(report: dict[str, Any], figure: Figure) -> dict[str, Any]:
    found: dict[str, Any] = report["results"][figure.key]["contenders"]
    return found


def test_every_way_says_what_it_is_and_the_patched_one_that_it_is(report: dict[str, Any]) -> None:
    assert list(report["contenders"]) == [*CHOSEN, BASE]
    for entry in report["contenders"].values():
        assert entry["version"].startswith("deepspeed ") and entry["settings"]
        assert not entry["failed"]
    assert "patched: tensors are detached" in report["contenders"][DECOUPLED_PATCHED]["settings"]
    assert report["contenders"][OURS]["fsyncs"] == "yes"


def test_what_cannot_run_on_a_cpu_is_tried_and_reported_with_its_own_error(
    report: dict[str, Any],
) -> None:
    found = report["cannot_run"]
    assert list(found) == [FAST]
    told = [found[FAST][str(stage)] for stage in STAGES] + [report["contenders"][FAST]["reason"]]
    # A torch that was built for CUDA, where there is no GPU, has words of its own.
    assert all("accelerator" in text or "NVIDIA driver" in text for text in told), told


def test_what_each_way_has_saved_comes_back_equal_on_both_ranks(report: dict[str, Any]) -> None:
    for name in CHOSEN:
        assert report["contenders"][name]["restored"] is (None if name == FAST else True)


def test_a_peer_that_does_not_load_its_own_files_is_named(report: dict[str, Any]) -> None:
    assert OURS not in report["cannot_load"]
    assert "Weights only load failed" in report["cannot_load"][DECOUPLED_PATCHED]["1"]


def test_all_ways_train_the_very_same_model(report: dict[str, Any]) -> None:
    (digest,) = {report["contenders"][name]["digest"] for name in RUNNING}
    assert "ZeRO 1" in digest and "ZeRO 3" in digest


@by_stage
def test_each_round_gives_what_a_save_costs(report: dict[str, Any], stage: int) -> None:
    for make in (ways.CALL, ways.EXTRA, ways.STALL, ways.LATEST, ways.DURABLE):
        found = rows(report, make(stage))
        assert list(found) == RUNNING
        for row in found.values():
            assert len(row["values"]) == report["settings"]["rounds"]
    for row in rows(report, ways.LATEST(stage)).values():
        assert row["min"] > 0


@by_stage
def test_what_a_way_leaves_out_to_be_durable_is_added_and_is_no_part_of_its_stall(
    report: dict[str, Any], stage: int
) -> None:
    left_out = rows(report, ways.FSYNC(stage))
    assert list(left_out) == [DECOUPLED_PATCHED]
    named, durable = rows(report, ways.LATEST(stage)), rows(report, ways.DURABLE(stage))
    for name, row in left_out.items():
        sums = [a + b for a, b in zip(named[name]["values"], row["values"], strict=True)]
        assert durable[name]["values"] == pytest.approx(sums)
    pairs = zip(named[OURS]["values"], durable[OURS]["values"], strict=True)
    assert all(seen_s <= durable_s for seen_s, durable_s in pairs)
    called = rows(report, ways.CALL(stage))
    assert durable[TORCH_FSYNC]["values"] == called[TORCH_FSYNC]["values"]


@by_stage
@pytest.mark.parametrize("every", INTERVALS)
def test_slowdowns_are_over_the_base_of_the_same_round(
    report: dict[str, Any], stage: int, every: int
) -> None:
    seconds = rows(report, ways.STEP(stage, every))
    assert list(seconds) == [*RUNNING, BASE]
    for name, row in rows(report, ways.SLOWDOWN(stage, every)).items():
        pairs = zip(seconds[name]["values"], seconds[BASE]["values"], strict=True)
        assert row["values"] == pytest.approx([with_saves / none for with_saves, none in pairs])


@by_stage
def test_both_ranks_write_and_no_more_than_the_state_and_small_files(
    report: dict[str, Any], stage: int
) -> None:
    if ways.AMPLIFICATION(stage).key not in report["results"]:
        pytest.skip("this filesystem does not count what is written")
    whole = rows(report, ways.AMPLIFICATION(stage))
    parts = [rows(report, ways.WRITTEN(stage, rank)) for rank in range(RANKS)]
    for name in (OURS, TORCH_FSYNC):
        # Small files: headers, manifests and DeepSpeed's scripts count too.
        assert 0.99 < whole[name]["min"] <= whole[name]["max"] < 1.3
        assert all(part[name]["min"] > 0.4 for part in parts)


@by_stage
def test_the_state_that_is_saved_is_the_same_in_all_ways(
    report: dict[str, Any], stage: int
) -> None:
    sizes = report["state"][str(stage)]
    assert list(sizes) == RUNNING
    assert len({size["state_bytes"] for size in sizes.values()}) == 1
    assert all(size["file_bytes"] > size["state_bytes"] > 2**20 for size in sizes.values())


@by_stage
def test_a_child_process_counts_as_memory(report: dict[str, Any], stage: int) -> None:
    found = rows(report, ways.MEMORY(stage))
    assert list(found) == RUNNING
    assert found[DECOUPLED_PATCHED]["min"] > 50e6 > found[OURS]["max"]


def test_tables_and_picture_are_written_and_the_root_is_left_as_it_was(
    output: Path, report: dict[str, Any]
) -> None:
    text = (output / "stdout").read_text()
    for words in (*CHOSEN, BASE, "Stall of one save", "until durable", "Cannot run or load here"):
        assert words in text
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((output / "root").iterdir())
    assert str(output) not in json.dumps(report)


# -- ranks that fail ---------------------------------------------------------------------------


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[StageCrew]:
    settings = DeepSpeedSettings(root=tmp_path, timeout_s=120.0)
    report = Report("deepspeed", {}, describe(tmp_path))
    run = Run(settings, report, tmp_path, lambda message: None)
    with forked(*IMPORTED), StageCrew(run) as stages:
        yield stages


def test_nothing_is_left_of_a_way_whose_rank_dies_not_even_its_orphans(
    stages: StageCrew,
) -> None:
    with stages.at(3):
        assert stages.joined(DECOUPLED)
        built = stages.ask(DECOUPLED, "build", name=DECOUPLED, stage=3, size=SIZE, engine={})
        assert built is not None
        assert built[0]["engine"] == "DecoupledCheckpointEngine"
        ranks = [psutil.Process(pid) for pid in stages.team(DECOUPLED).pids]
        children = [child for rank in ranks for child in rank.children(recursive=True)]
        assert len(children) >= RANKS
        buffers = f"deepspeed_*_{stages.team(DECOUPLED).port}_*"
        assert list(SHARED_MEMORY.glob(buffers))
        stages.passed(DECOUPLED)
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert stages.ask(DECOUPLED, "warm") is None
        assert DECOUPLED not in stages.names()
    _, left = psutil.wait_procs([*ranks, *children], timeout=30)
    assert not left
    assert not list(SHARED_MEMORY.glob(buffers))
    entrant = stages.report.entrants[DECOUPLED]
    assert entrant.failed and "ZeRO 3" in str(entrant.reason)


def test_a_launch_that_fails_says_why_and_takes_nobody_along(
    stages: StageCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = dataclasses.replace(LAUNCH, worker="ckpt_core.bench.nowhere:Worker")
    monkeypatch.setattr(stages, "_launch", nowhere)
    with stages.at(1):
        assert not stages.joined(FAST)
        assert FAST not in stages.names() and OURS in stages.names()
    assert "nowhere" in stages.report.more["cannot_run"][FAST]["1"]
