"""What people see of a run: names, units and pictures; all of it can be made again from the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_core.bench import Report
from ckpt_core.bench.contenders import NAMES, OURS, RANKED, contender_class, way_class
from ckpt_core.bench.core import PERSIST, SLOWDOWN, STALL_CALL
from ckpt_core.bench.plot import short
from ckpt_core.bench.results import Entrant
from ckpt_core.system.machine import describe
from tests.bench.quick import ckpt_core_bench

PEERS = ("torch_save_fsync", "dcp_save", "dcp_async_reused")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    settings = {"state_bytes": 8e8, "leaves": 384, "rounds": 3, "intervals": [1, 5]}
    made = Report("core", settings, describe(tmp_path_factory.mktemp("root")))
    for name in (OURS, *PEERS, "raw_disk"):
        made.entrants[name] = Entrant(fsyncs="yes", title=contender_class(name).title)
        for number in (1.0, 2.0, 3.0):
            made.add(PERSIST, name, number * 1e9)
            if name != "raw_disk":
                made.add(STALL_CALL, name, number * 0.617)
                made.add(SLOWDOWN(1), name, number)
                made.add(SLOWDOWN(5), name, number / 2)
    return made


@pytest.fixture(scope="module")
def figures(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("figures") / "bench.json"
    path.write_text(json.dumps(report.to_json()))
    return path


def test_a_report_comes_back_from_its_json(report: Report) -> None:
    plain = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(plain).to_json() == plain


def test_tables_have_names_for_people_and_the_json_has_identifiers(
    report: Report, figures: Path
) -> None:
    shown = ckpt_core_bench(["--from", str(figures)])
    assert shown.exit_code == 0, shown.output
    for name in report.entrants:
        row = next(line for line in shown.output.splitlines() if report.title(name) in line)
        assert name == "torch_save_fsync" or name not in row.split()
    assert {*PEERS, OURS} < report.to_json()["results"]["persist"]["contenders"].keys()


def test_every_contender_has_a_name_of_its_own_for_people() -> None:
    for titles in (
        [contender_class(name).title for name in NAMES],
        [way_class(name).title for name in RANKED],
    ):
        assert all(titles)
        assert len(set(titles)) == len(titles)


def test_the_picture_is_drawn_from_the_json_alone(figures: Path, tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    shown = ckpt_core_bench(["--from", str(figures), "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "svg" in picture.read_text()[:200]


def test_the_headline_is_a_picture_and_a_table_of_the_same_numbers(
    figures: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "headline.svg"
    shown = ckpt_core_bench(["--from", str(figures), "--headline", str(picture)])
    assert shown.exit_code == 0, shown.output
    drawn = picture.read_text()
    for text in ("ckpt-core", "DCP async, reused stager", "1,234 ms", "2 GB/s", "lower is better"):
        assert text in drawn
    assert "| durable, GB/s (the bare disk: 2) | **2** | 2 | 2 | 2 |" in shown.output
    assert "| the call holds training up, ms | **1,234** | 1,234 |" in shown.output


def test_the_headline_of_the_same_figures_is_the_same_bytes(figures: Path, tmp_path: Path) -> None:
    pictures = [tmp_path / f"{number}.svg" for number in range(2)]
    for picture in pictures:
        ckpt_core_bench(["--from", str(figures), "--headline", str(picture)])
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_a_headline_of_a_run_without_saves_is_refused_in_words(
    report: Report, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**report.to_json(), "results": {}}))
    shown = ckpt_core_bench(["--from", str(path), "--headline", str(tmp_path / "x.svg")])
    assert shown.exit_code == 2
    assert "--measure save" in shown.output


@pytest.mark.parametrize(
    ("content", "text"),
    [("no JSON", "cannot be read"), ("[]", "bench --json"), ('{"schema": 9}', "schema 9")],
)
def test_a_file_that_holds_no_figures_is_refused_in_words(
    content: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    shown = ckpt_core_bench(["--from", str(path)])
    assert shown.exit_code == 2
    assert text in shown.output


@pytest.mark.parametrize(
    ("value", "text"), [(1280.0, "1,280"), (191_000.0, "191,000"), (0.917, "0.917"), (2.0, "2")]
)
def test_no_number_beside_a_bar_has_an_exponent(value: float, text: str) -> None:
    assert short(value) == text
