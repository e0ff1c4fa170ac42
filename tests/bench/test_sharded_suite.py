"""The suites of Lightning's strategies that shard: one quick run of each. Nothing is asserted about times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from ckpt_core.bench.fits import BASE
from ckpt_core.errors import ConfigError
from ckpt_lightning_tools.bench.sharded import FsdpSettings
from tests.bench.quick import assert_all_ran, quick_run, reason_without, report_of

pytestmark = pytest.mark.timeout(400)


MEASURES = {"fsdp": ("train", "save"), "deepspeed": ("save", "resume")}
"""What is the same for both is measured of one."""

_LIGHTNING = ("lightning.pytorch", "ckpt_lightning", "ckpt_lightning_tools.bench.sharded_worker")
IMPORTED = {
    "fsdp": _LIGHTNING,
    "deepspeed": (*_LIGHTNING, "deepspeed", "torch._dynamo.eval_frame"),
}

FIGURES = {
    "train": ("slowdown_every_1", "train_stall_every_3"),
    "save": ("large_stall", "large_longest_step"),
    "resume": ("resume",),
}


@pytest.mark.parametrize("strategy", list(MEASURES))
def test_each_way_runs_on_two_ranks_and_goes_on_from_what_training_ended_with(
    tmp_path: Path, strategy: str
) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    asked = [text for measure in MEASURES[strategy] for text in ("--measure", measure)]
    suite = f"lightning-{strategy}"
    report = report_of(quick_run(tmp_path, "--suite", suite, *asked, imported=IMPORTED[strategy]))
    names = FsdpSettings.contenders
    assert_all_ran(report, names, framework="lightning")
    saving = [name for name in names if name != BASE]
    assert all(report["contenders"][name]["restored"] is True for name in saving)
    for figure in (name for measure in MEASURES[strategy] for name in FIGURES[measure]):
        rows = report["results"][figure]["contenders"]
        assert set(rows) >= set(saving)
        assert all(len(row["values"]) == report["settings"]["rounds"] for row in rows.values())
    assert not list((tmp_path / "root").iterdir())


def test_a_strategy_whose_package_is_missing_says_how_to_install_it() -> None:
    worker = "ckpt_lightning_tools.bench.sharded_worker:DeepSpeedWorker"
    asked = "('ckpt_core', pathlib.Path()).hello()"
    reason = reason_without("ckpt_deepspeed", worker=worker, asked=asked)
    assert "pip install 'ckpt-core[lightning,deepspeed]'" in reason


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"contenders": ("async_checkpoint_io",)}, "unknown contenders"),
        ({"intervals": ()}, "intervals"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FsdpSettings(**{"root": tmp_path, **options})
