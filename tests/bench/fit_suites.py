"""What holds for each suite of fits under a framework: its tests inherit these, and have one quick run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckpt_core.bench import OURS
from ckpt_core.bench.fits import BASE
from tests.bench.quick import assert_all_ran

INTERVALS = (1, 3)


class QuickRun:
    """Its module has the fixtures `output` and `report`."""

    names: ClassVar[Sequence[str]]
    framework: ClassVar[str]

    @property
    def saving(self) -> list[str]:
        return [name for name in self.names if name != BASE]

    def test_every_way_ran_and_says_what_it_is(self, report: dict[str, Any]) -> None:
        assert_all_ran(report, self.names, framework=self.framework)
        assert report["contenders"][OURS]["fsyncs"] == "yes"

    def test_what_a_way_has_saved_is_what_training_ended_with(self, report: dict[str, Any]) -> None:
        for name in self.saving:
            assert report["contenders"][name]["restored"] is True, name

    @pytest.mark.parametrize(
        "figure", ["slowdown_every", "train_stall_every", "fit_every", "peak_memory_every"]
    )
    @pytest.mark.parametrize("every", INTERVALS)
    def test_each_interval_has_a_figure_of_each_way_for_each_round(
        self, report: dict[str, Any], figure: str, every: int
    ) -> None:
        rows = report["results"][f"{figure}_{every}"]["contenders"]
        assert list(rows) == self.saving
        for row in rows.values():
            assert len(row["values"]) == report["settings"]["rounds"]
            assert 0 < row["min"] <= row["median"] <= row["max"]
        assert rows[OURS]["ratio_to_ours"] == 1

    @pytest.mark.parametrize("figure", ["large_stall", "large_peak_memory", "resume"])
    def test_the_large_state_is_measured_for_each_way_that_saves(
        self, report: dict[str, Any], figure: str
    ) -> None:
        assert list(report["results"][figure]["contenders"]) == self.saving

    @pytest.mark.parametrize("figure", ["large_longest_step", "large_train_step", "large_fit"])
    def test_times_of_the_large_state_have_those_without_saves_beside_them(
        self, report: dict[str, Any], figure: str
    ) -> None:
        assert list(report["results"][figure]["contenders"]) == list(self.names)

    def test_the_report_names_the_size_that_was_measured(self, report: dict[str, Any]) -> None:
        settings = report["settings"]
        assert settings["leaves"] > 10
        assert abs(settings["state_bytes"] / (2 * 2**20) - 1) < 0.1

    def test_tables_and_picture_are_written_and_the_root_is_left_as_it_was(
        self, output: Path
    ) -> None:
        text = (output / "stdout").read_text()
        titles = ("Training step over none", "Stall of a save", "End-to-end fit", "Large state")
        assert all(title in text for title in titles)
        assert (output / "out.png").read_bytes().startswith(b"\x89PNG")
        assert not list((output / "root").iterdir())
