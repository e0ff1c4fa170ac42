"""The suite `transformers`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ckpt_core.bench import OURS
from ckpt_core.bench.fits import BASE
from ckpt_transformers_tools.bench import NAMES
from tests.bench.quick import assert_all_ran, quick_fixtures

SAVING = [name for name in NAMES if name != BASE]
BY_INTERVAL = ("slowdown_every", "train_stall_every", "fit_every", "peak_memory_every")

pytestmark = pytest.mark.timeout(300)

output, report = quick_fixtures("--suite", "transformers")


def test_every_way_ran_and_says_what_it_is(report: dict[str, Any]) -> None:
    assert_all_ran(report, NAMES, framework="transformers")
    assert report["contenders"][OURS]["fsyncs"] == "yes"


@pytest.mark.parametrize("name", SAVING)
def test_what_a_way_has_saved_is_what_training_ended_with(
    report: dict[str, Any], name: str
) -> None:
    assert report["contenders"][name]["restored"] is True


@pytest.mark.parametrize("figure", BY_INTERVAL)
@pytest.mark.parametrize("every", [1, 3])
def test_each_interval_has_a_figure_of_each_way_for_each_round(
    report: dict[str, Any], figure: str, every: int
) -> None:
    rows = report["results"][f"{figure}_{every}"]["contenders"]
    assert list(rows) == SAVING
    for row in rows.values():
        assert len(row["values"]) == report["settings"]["rounds"]
        assert 0 < row["min"] <= row["median"] <= row["max"]


@pytest.mark.parametrize("figure", ["large_stall", "large_peak_memory", "resume"])
def test_the_large_state_is_measured_for_each_way_that_saves(
    report: dict[str, Any], figure: str
) -> None:
    assert list(report["results"][figure]["contenders"]) == SAVING


def test_the_report_names_the_size_that_was_measured_and_the_root_is_left_as_it_was(
    report: dict[str, Any], output: Path
) -> None:
    settings = report["settings"]
    assert settings["leaves"] > 10
    assert abs(settings["state_bytes"] / (2 * 2**20) - 1) < 0.1
    assert not list((output / "root").iterdir())
