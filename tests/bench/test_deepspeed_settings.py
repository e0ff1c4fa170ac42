"""The suite `deepspeed` without DeepSpeed: its windows, its settings, and what a report makes of failures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench import OURS
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.bench.run import Run
from ckpt_core.bench.window import Window
from ckpt_core.errors import ConfigError
from ckpt_core.system.machine import describe
from ckpt_deepspeed_tools.bench import DeepSpeedSettings, suite, ways
from ckpt_deepspeed_tools.bench.crew import StageCrew
from ckpt_deepspeed_tools.bench.ways import BASE, FAST, NAMES, OWN, PERSISTED, WAYS
from tests.bench.quick import ckpt_core_bench, reason_without

INTERVALS = (1, 5, 20)


@pytest.mark.parametrize("every", INTERVALS)
def test_a_window_is_made_of_whole_intervals_and_begins_with_a_save(
    every: int, tmp_path: Path
) -> None:
    window = DeepSpeedSettings(root=tmp_path).window(every)
    saved = [step for step in range(1, window.steps + 1) if window.due(window.lead + step)]
    assert saved == list(range(1, window.steps + 1, every))
    assert window.steps == every * len(saved) >= 10


def test_a_window_without_saves_has_none() -> None:
    window = Window(every=0, lead=1, steps=5)
    assert not any(window.due(step) for step in range(1, 7))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"intervals": ()}, "intervals"),
        ({"contenders": ("torch_save",)}, "unknown contenders"),
        ({"state_bytes": 10}, "state_bytes"),
        ({"quiet_steps": 0}, "quiet_steps"),
        ({"stages": (0,)}, "stages"),
        ({"stages": ()}, "stages"),
        ({"measures": ()}, "measures"),
        ({"root": Path("/nowhere")}, "root"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DeepSpeedSettings(**{"root": tmp_path, **options})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--leaves", "9"], "--leaves"),
        (["--ranks", "2"], "--ranks"),
        (["--measure", "restore"], "choose of save, train"),
        (["--contender", "replicated"], "replicated"),
        (["--state-bytes", "900TiB"], "free"),
    ],
)
def test_options_of_other_suites_are_refused(
    arguments: list[str], text: str, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="without DeepSpeed, that is what is said first")
    result = ckpt_core_bench(["--suite", "deepspeed", "--root", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert text in result.output
    assert list(tmp_path.iterdir()) == []


def test_without_deepspeed_the_suite_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    result = ckpt_core_bench(["--suite", "deepspeed", "--quick", "--root", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install 'ckpt-core[deepspeed]'" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_integration_is_missing_says_how_to_install_it() -> None:
    worker = "ckpt_deepspeed_tools.bench.worker:DeepSpeedWorker"
    asked = "('rank-0', pathlib.Path()).join(1, 2)"
    reason = reason_without("ckpt_deepspeed", "deepspeed", worker=worker, asked=asked)
    assert "pip install 'ckpt-core[deepspeed]'" in reason


def test_ours_come_first_and_the_base_last() -> None:
    assert (NAMES[0], NAMES[1], NAMES[-1]) == (OURS, PERSISTED, BASE)
    assert all("checkpoint_engine" in WAYS[name].config for name in OWN)


def test_stages_and_intervals_have_figures_of_their_own() -> None:
    keys = {ways.SLOWDOWN(stage, every).key for stage in (1, 3) for every in INTERVALS}
    assert len(keys) == 2 * len(INTERVALS)


def test_a_difference_below_nothing_has_no_ratio(tmp_path: Path) -> None:
    report = Report("deepspeed", {}, describe(tmp_path))
    report.entrants = {OURS: Entrant(), FAST: Entrant()}
    report.add(ways.EXTRA(1), OURS, 0.01)
    report.add(ways.EXTRA(1), FAST, -0.02)
    assert report.ratio(ways.EXTRA(1), OURS) == 1
    assert report.ratio(ways.EXTRA(1), FAST) is None


def test_a_peer_that_stops_is_told_from_one_that_cannot_run_and_ours_may_do_neither(
    tmp_path: Path,
) -> None:
    report = Report("deepspeed", {}, describe(tmp_path))
    run = Run(DeepSpeedSettings(root=tmp_path), report, tmp_path, lambda message: None)
    crew = StageCrew(run)
    with crew.at(1):
        crew.give_up(FAST, "no device")
        assert report.sound and not report.entrants[FAST].failed
        assert report.more["cannot_run"] == {FAST: {"1": "no device"}}
        crew.give_up(OURS, "no memory")
    assert report.entrants[OURS].failed and not report.sound


@pytest.mark.parametrize(
    ("changed", "equal"), [({}, True), ({"saved": "b"}, False), ({"latest": False}, False)]
)
def test_what_is_restored_otherwise_makes_the_run_unsound(
    tmp_path: Path, changed: dict[str, Any], equal: bool
) -> None:
    report = Report("deepspeed", {}, describe(tmp_path))
    report.entrants = {OURS: Entrant()}
    report.more = {"state": {}, "cannot_load": {}}
    size = {"state_bytes": 10, "leaves": 1, "file_bytes": 12}
    whole = {"saved": "a", "latest": True, "problem": None, **size}
    warmed = [{"live": "a"}, {"live": "a"}]
    suite._note_check(report, 1, OURS, warmed, [whole, {**whole, **changed}])
    suite._note_check(report, 3, OURS, warmed, [whole, whole])
    assert report.entrants[OURS].restored is equal
    assert report.sound is equal


def test_without_the_base_there_is_nothing_to_compare(tmp_path: Path) -> None:
    report = Report("deepspeed", {}, describe(tmp_path))
    run = Run(DeepSpeedSettings(root=tmp_path), report, tmp_path, lambda message: None)
    crew = StageCrew(run)
    with pytest.raises(ConfigError, match="cannot run"):
        crew.give_up(BASE, "no ports")
