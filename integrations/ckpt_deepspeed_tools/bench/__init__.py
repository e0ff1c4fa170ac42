"""The suite `deepspeed`: the same training on 2 ranks under DeepSpeed, with each way to save, and with none.

At ZeRO 1 and 3 in bf16, on real DeepSpeed over Gloo: how long a save holds training up, when `latest` names
it, when it is durable, what it takes of memory and writes to storage, and what training loses by a save every
1, 5, 20 steps.

    settings -> crew (two ranks for each way, which serve requests) -> rounds -> figures -> tables, drawing

A peer that cannot run here is tried all the same, in processes of its own, and reported with its own error;
the one peer that is measured with a change to DeepSpeed is named so, and the change is in `patches`.
DeepSpeed and `ckpt_deepspeed` are imported by the ranks alone.

Call order: `DeepSpeedSettings(...)` -> `run(settings)` -> `render(report)`, `drawings(report)`.
"""

from __future__ import annotations

import sys

from ckpt_core.bench.suites import Former
from ckpt_deepspeed_tools.bench.drawing import drawings
from ckpt_deepspeed_tools.bench.rounds import run
from ckpt_deepspeed_tools.bench.settings import DeepSpeedMeasure, DeepSpeedSettings
from ckpt_deepspeed_tools.bench.tables import render
from ckpt_deepspeed_tools.bench.ways import BASE, NAMES, SAVING

SUITE = Former("deepspeed", sys.modules[__name__])

__all__ = [
    "BASE",
    "NAMES",
    "SAVING",
    "SUITE",
    "DeepSpeedMeasure",
    "DeepSpeedSettings",
    "drawings",
    "render",
    "run",
]
