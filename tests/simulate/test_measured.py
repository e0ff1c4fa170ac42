"""What `ckpt-core bench` writes, read back as rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import ConfigError
from ckpt_core.bench import core, results
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.simulate import Measured, read_bench
from ckpt_core.system.machine import describe

FIGURES = {
    core.PERSIST: {"ckpt_core": 2e9, "torch_save": 0.5e9, "torch_save_fsync": 0.4e9},
    core.STALL_CALL: {"ckpt_core": 0.002},
    core.STALL_BARRIER: {"ckpt_core": 0.25},
    core.RESTORE_WARM: {"ckpt_core": 5e9},
    core.RESTORE_COLD: {"ckpt_core": 1.5e9},
    results.TRAIN_BASE: {"ckpt_core": 0.125, "torch_save": 0.13},
}


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """The JSON of a run of the suite core."""
    made = Report("core", {"state_bytes": 10**9}, describe(tmp_path))
    for figure, values in FIGURES.items():
        for contender, value in values.items():
            made.entrants.setdefault(contender, Entrant())
            for noise in (0.5, 1.0, 3.0):
                made.add(figure, contender, value * noise)
    return made.to_json()


def test_medians_become_rates(report: dict[str, Any]) -> None:
    assert read_bench(report) == Measured(
        state_bytes=1e9,
        iteration_s=0.125,
        write=2e9,
        serial=0.4e9,
        copy=4e9,
        read=1.5e9,
        stall_s=0.002,
    )


def test_what_was_not_measured_is_left_open(report: dict[str, Any]) -> None:
    del report["results"]["restore_cold"], report["results"]["train_step"]
    del report["results"]["persist"]["contenders"]["torch_save_fsync"]
    found = read_bench(report)
    assert (found.read, found.serial, found.iteration_s) == (5e9, 0.5e9, None)


@pytest.mark.parametrize(
    "change",
    [
        {"suite": "ranks"},
        {"results": None},
        {"settings": {}},
        {"results": {"persist": []}},
        {"results": {"persist": {"contenders": {"ckpt_core": 2e9}}}},
        {"settings": {"state_bytes": 10**400}},
    ],
)
def test_what_is_no_such_file_is_told_by_name(
    report: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"b\.json"):
        read_bench({**report, **change}, name="b.json")
