"""The suite `lightning`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from ckpt_core.bench import OURS, ModelSize
from ckpt_core.bench.fits import BASE
from ckpt_core.errors import ConfigError
from ckpt_lightning_tools.bench import NAMES, LightningSettings, fitting
from ckpt_lightning_tools.bench.suite import MODEL_CHECKPOINT
from tests.bench.quick import assert_all_ran, ckpt_core_bench, quick_fixtures

INTERVALS = (1, 3)
SAVING = [name for name in NAMES if name != BASE]
BY_INTERVAL = ("slowdown_every", "train_stall_every", "fit_every", "peak_memory_every")

pytestmark = pytest.mark.timeout(300)

output, report = quick_fixtures("--suite", "lightning")


def test_every_way_ran_and_says_what_it_is(report: dict[str, Any]) -> None:
    assert_all_ran(report, NAMES, framework="lightning")
    assert report["contenders"][OURS]["fsyncs"] == "yes"


@pytest.mark.parametrize("name", SAVING)
def test_what_a_way_has_saved_is_what_training_ended_with(
    report: dict[str, Any], name: str
) -> None:
    assert report["contenders"][name]["restored"] is True


@pytest.mark.parametrize("figure", BY_INTERVAL)
@pytest.mark.parametrize("every", INTERVALS)
def test_each_interval_has_a_figure_of_each_way_for_each_round(
    report: dict[str, Any], figure: str, every: int
) -> None:
    rows = report["results"][f"{figure}_{every}"]["contenders"]
    assert list(rows) == SAVING
    for row in rows.values():
        assert len(row["values"]) == report["settings"]["rounds"]
        assert 0 < row["min"] <= row["median"] <= row["max"]
    assert rows[OURS]["ratio_to_ours"] == 1


@pytest.mark.parametrize("figure", ["large_stall", "large_peak_memory", "resume"])
def test_the_large_state_is_measured_for_each_way_that_saves(
    report: dict[str, Any], figure: str
) -> None:
    assert list(report["results"][figure]["contenders"]) == SAVING


@pytest.mark.parametrize("figure", ["large_longest_step", "large_train_step", "large_fit"])
def test_times_of_the_large_state_have_those_without_saves_beside_them(
    report: dict[str, Any], figure: str
) -> None:
    assert list(report["results"][figure]["contenders"]) == list(NAMES)


def test_the_report_names_the_size_that_was_measured(report: dict[str, Any]) -> None:
    settings = report["settings"]
    assert settings["leaves"] > 10
    assert abs(settings["state_bytes"] / (2 * 2**20) - 1) < 0.1


def test_tables_and_picture_are_written_and_the_root_is_left_as_it_was(output: Path) -> None:
    text = (output / "stdout").read_text()
    for title in ("Training step over none", "Stall of a save", "End-to-end fit", "Large state"):
        assert title in text
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((output / "root").iterdir())


def test_a_way_whose_package_is_missing_says_how_to_install_it(tmp_path: Path) -> None:
    code = (
        "import json, pathlib, sys\n"
        "sys.modules['ckpt_lightning'] = None\n"
        "from ckpt_lightning_tools.bench.worker import LightningWorker\n"
        f"print(json.dumps(LightningWorker('{OURS}', pathlib.Path()).hello()))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    reason = json.loads(done.stdout.splitlines()[-1])["reason"]
    assert "ckpt_lightning" in reason
    assert "pip install 'ckpt-core[lightning]'" in reason


def test_the_large_model_is_as_large_as_was_asked_for(tmp_path: Path) -> None:
    for wanted in (2 * 2**20, 100 * 10**6, 768 * 2**20, 4 * 2**30):
        found = LightningSettings(root=tmp_path, state_bytes=wanted).large_model()
        assert isinstance(found, ModelSize)
        assert abs(found.state_bytes / wanted - 1) < 0.02


def test_every_save_under_the_clock_has_a_next_step_to_hold_up(tmp_path: Path) -> None:
    settings = LightningSettings(root=tmp_path)
    windows = [settings.window(every) for every in settings.intervals] + [settings.large_window()]
    for window in windows:
        last = window.lead + window.steps
        saved = [step for step in range(1, last + 1) if step % window.every == 0]
        counted = [step for step in saved if step > window.lead]
        assert window.steps % window.every == 0
        assert len(counted) == window.steps // window.every
        assert counted[0] == window.lead + 1


def test_the_newest_of_lightnings_files_is_that_of_the_latest_step_whenever_it_was_written(
    tmp_path: Path,
) -> None:
    for second, step in enumerate(
        (10, 2)
    ):  # as where a file that was to be removed is written late
        file = tmp_path / f"epoch=0-step={step}.ckpt"
        tree = {"state_dict": {"w": torch.tensor(step)}, "optimizer_states": [{"state": {}}]}
        torch.save(tree, file)
        os.utime(file, (second, second))
    assert fitting.saved_state(MODEL_CHECKPOINT, tmp_path) == {"model.w": torch.tensor(10)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"intervals": ()}, "intervals"),
        ({"contenders": ("torch_save",)}, "unknown contenders"),
        ({"state_bytes": 10}, "state_bytes"),
        ({"rounds": 0}, "rounds"),
        ({"measures": ()}, "measures"),
        ({"root": Path("/nowhere")}, "root"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LightningSettings(**{"root": tmp_path, **options})


def test_options_of_other_suites_are_refused(tmp_path: Path) -> None:
    for more, text in ((["--leaves", "9"], "--leaves"), (["--ranks", "2"], "--ranks")):
        arguments = ["--suite", "lightning", "--root", str(tmp_path), *more]
        result = ckpt_core_bench(arguments)
        assert result.exit_code == 2
        assert text in result.output
