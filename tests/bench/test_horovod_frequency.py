"""The suite `horovod` without Horovod: its windows, its settings, and how often a way can save."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench import OURS
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.bench.window import Window
from ckpt_core.errors import ConfigError
from ckpt_core.system.machine import describe
from ckpt_horovod_tools.bench import HorovodSettings
from ckpt_horovod_tools.bench.frequency import Frequency, frequencies
from ckpt_horovod_tools.bench.ways import BASE, ITERATION, NAMES, NO_SPIN, overhead
from tests.bench.quick import ckpt_core_bench, reason_without

INTERVALS = (1, 5, 10, 20)


def report_of(tmp_path: Path, overheads: dict[int, float]) -> Report:
    report = Report("horovod", {"intervals": INTERVALS}, describe(tmp_path))
    report.entrants = {OURS: Entrant(), BASE: Entrant()}
    for every, over in overheads.items():
        report.add(ITERATION(every), BASE, 0.1)
        report.add(overhead(every, BASE), OURS, over)
    return report


def test_the_shortest_interval_is_the_one_from_which_on_all_stay_below_the_bound(
    tmp_path: Path,
) -> None:
    report = report_of(tmp_path, {1: 0.9, 5: 0.08, 10: 0.04, 20: 0.01})
    (found,) = frequencies(report, OURS)
    assert (found.base, found.measured, found.predicted) == (BASE, 10, 8)
    assert found.save_s == pytest.approx(0.04)


def test_an_interval_below_the_bound_does_not_count_where_a_longer_one_is_above(
    tmp_path: Path,
) -> None:
    report = report_of(tmp_path, {1: 0.9, 5: 0.04, 10: 0.06, 20: 0.01})
    (found,) = frequencies(report, OURS)
    assert (found.measured, found.predicted) == (20, 11)


def test_a_way_that_never_stays_below_needs_more_than_the_longest_interval(tmp_path: Path) -> None:
    report = report_of(tmp_path, {1: 2.0, 5: 0.5, 10: 0.3, 20: 0.1})
    (found,) = frequencies(report, OURS)
    assert found == Frequency(BASE, None, 20, 40, pytest.approx(0.2))


def test_a_save_that_costs_nothing_can_be_made_at_every_step(tmp_path: Path) -> None:
    report = report_of(tmp_path, dict.fromkeys(INTERVALS, -0.02))
    (found,) = frequencies(report, OURS)
    assert (found.measured, found.predicted) == (1, 1)


def test_without_overheads_nothing_is_predicted(tmp_path: Path) -> None:
    assert frequencies(report_of(tmp_path, {}), OURS) == []


def test_overheads_have_no_ratio(tmp_path: Path) -> None:
    report = report_of(tmp_path, {1: 0.5})
    assert report.ratio(overhead(1, BASE), OURS) is None


def test_the_two_bases_have_figures_of_their_own() -> None:
    keys = {overhead(every, base).key for every in INTERVALS for base in (BASE, NO_SPIN)}
    assert len(keys) == 2 * len(INTERVALS)


@pytest.mark.parametrize("every", INTERVALS)
def test_a_window_is_made_of_whole_intervals_and_begins_with_a_save(
    every: int, tmp_path: Path
) -> None:
    window = HorovodSettings(root=tmp_path).window(every)
    timed = range(window.lead + 1, window.lead + window.steps + 1)
    saved = [number for number in timed if window.due(number)]
    assert saved[0] == window.lead + 1
    assert window.steps == every * len(saved) == every * window.timed_saves
    assert [b - a for a, b in itertools.pairwise(saved)] == [every] * (len(saved) - 1)


def test_saves_before_the_clock_are_counted_too() -> None:
    window = Window(every=5, warm_saves=3, lead=8, steps=10)
    numbers = [number for number in range(1, 19) if window.due(number)]
    assert numbers == [1, 2, 3, 4, 9, 14]
    assert window.saves == 6
    assert window.timed_saves == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"intervals": ()}, "intervals"),
        ({"contenders": ("torch_save",)}, "unknown contenders"),
        ({"state_bytes": 10}, "state_bytes"),
        ({"lead_steps": 0}, "lead_steps"),
        ({"measures": ()}, "measures"),
        ({"root": Path("/nowhere")}, "root"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HorovodSettings(**{"root": tmp_path, **options})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--leaves", "9"], "--leaves"),
        (["--ranks", "2"], "--ranks"),
        (["--measure", "save"], "choose of train"),
        (["--contender", "replicated"], "replicated"),
        (["--state-bytes", "900TiB"], "free"),
    ],
)
def test_options_of_other_suites_are_refused(
    arguments: list[str], text: str, tmp_path: Path
) -> None:
    result = ckpt_core_bench(["--suite", "horovod", "--root", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert text in result.output
    assert list(tmp_path.iterdir()) == []


def test_without_horovod_the_suite_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    result = ckpt_core_bench(["--suite", "horovod", "--quick", "--root", str(tmp_path)])
    assert result.exit_code == 2
    assert "docs/horovod.md#installing" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_integration_is_missing_says_how_to_install_it() -> None:
    worker = "ckpt_horovod_tools.bench.worker:HorovodWorker"
    asked = "(pathlib.Path()).hello()"
    reason = reason_without("ckpt_horovod", "horovod.torch", worker=worker, asked=asked)
    assert "docs/horovod.md#installing" in reason


def test_ours_comes_first_and_the_bases_last() -> None:
    assert (NAMES[0], NAMES[-2:]) == (OURS, (NO_SPIN, BASE))
