"""The suite `lightning`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from ckpt_core.bench import OURS, ModelSize
from ckpt_core.errors import ConfigError
from ckpt_lightning_tools.bench import NAMES, LightningSettings, fitting
from ckpt_lightning_tools.bench.suite import MODEL_CHECKPOINT
from tests.bench.fit_suites import QuickRun
from tests.bench.quick import ckpt_core_bench, quick_fixtures, reason_without

pytestmark = pytest.mark.timeout(300)

output, report = quick_fixtures(
    "--suite", "lightning", imported=["ckpt_lightning", "ckpt_lightning_tools.bench.fitting"]
)


class TestQuickRun(QuickRun):
    names = NAMES
    framework = "lightning"


def test_a_way_whose_package_is_missing_says_how_to_install_it(tmp_path: Path) -> None:
    worker = "ckpt_lightning_tools.bench.worker:LightningWorker"
    asked = f"('{OURS}', pathlib.Path()).hello()"
    reason = reason_without("ckpt_lightning", worker=worker, asked=asked)
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
