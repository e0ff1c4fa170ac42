"""Reports are plain values: medians, ratios and their JSON form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_core.bench import Settings
from ckpt_core.bench.core import PERSIST
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.cli.bench import Request, _write
from ckpt_core.errors import ConfigError
from ckpt_core.system.machine import describe


@pytest.fixture
def report(tmp_path: Path) -> Report:
    report = Report("core", {}, describe(tmp_path))
    report.entrants = {"ckpt_core": Entrant(fsyncs="yes"), "torch_save": Entrant(fsyncs="no")}
    for ours, theirs in ((2.0, 1.0), (4.0, 1.0), (3.0, 7.0)):
        report.add(PERSIST, "ckpt_core", ours)
        report.add(PERSIST, "torch_save", theirs)
    return report


def test_a_row_shows_the_lowest_the_middle_and_the_highest(report: Report) -> None:
    row = report.to_json()["results"]["persist"]["contenders"]["torch_save"]
    assert (row["min"], row["median"], row["max"]) == (1.0, 1.0, 7.0)
    assert row["ratio_to_ours"] == pytest.approx(1 / 3)


def test_without_ours_there_are_figures_and_no_ratios(report: Report) -> None:
    del report.values["persist"]["ckpt_core"]
    assert report.ratio(PERSIST, "torch_save") is None
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


def test_only_files_that_were_fsynced_count_as_durable() -> None:
    assert Entrant(fsyncs="files, not directories").durable
    assert not Entrant(fsyncs="no").durable


def test_a_report_is_sound_while_a_peer_fails_and_unsound_when_bytes_differ(
    report: Report,
) -> None:
    report.entrants["torch_save"].failed = True
    assert report.sound
    report.entrants["torch_save"].restored = False
    assert not report.sound


def test_a_report_is_unsound_when_our_engine_failed(report: Report) -> None:
    report.entrants["ckpt_core"].failed = True
    assert not report.sound


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"leaves": 3}, {"train_steps": 1}, {"intervals": ()}, {"contenders": ()}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Settings(root=tmp_path, **wrong)  # type: ignore[arg-type]


def test_tables_that_go_into_a_file_have_whole_rows(
    report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report.settings = {"state_bytes": 1, "leaves": 1, "rounds": 3, "intervals": ()}
    long = "a_contender_whose_name_is_longer_than_most_of_what_people_call_one"
    report.entrants[long] = Entrant("1.0", "files, not directories", "Word. " * 40)
    report.add(PERSIST, long, 1e9)
    _write(report, Request())
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if long in line and "1.00" in line]
    assert "files, not directories" in row
    # Sentences are wrapped all the same.
    assert max(map(len, lines)) < 240
