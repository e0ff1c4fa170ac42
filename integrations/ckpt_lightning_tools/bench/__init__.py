"""The suite `lightning`: the same training under Lightning, with each of its ways to save, and with none.

    train  a small model, a save every 1, 5, 10, 25, 50 steps: slowdown, stall, end-to-end time, memory
    save   a large state, three saves: stall, the longest step, end-to-end time, memory

Each way runs in a process of its own, which is the only place where Lightning and `ckpt_lightning` are
imported; where they are missing, the report says how to install them.

Call order: `LightningSettings(...)` -> `run(settings)` -> `render(report)`, `drawings(report)`.
"""

from __future__ import annotations

import sys

from ckpt_core.bench.suites import Former
from ckpt_lightning_tools.bench.drawing import drawings
from ckpt_lightning_tools.bench.rounds import run
from ckpt_lightning_tools.bench.settings import LightningMeasure, LightningSettings
from ckpt_lightning_tools.bench.tables import render
from ckpt_lightning_tools.bench.ways import BASE, NAMES

SUITE = Former("lightning", sys.modules[__name__])

__all__ = [
    "BASE",
    "NAMES",
    "SUITE",
    "LightningMeasure",
    "LightningSettings",
    "drawings",
    "render",
    "run",
]
