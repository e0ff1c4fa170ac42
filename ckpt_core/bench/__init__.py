"""`ckpt-core bench`: this engine beside the other ways to save a PyTorch state, on the machine at hand.

    settings -> crew (one process for each contender) -> rounds -> results -> tables, plot, JSON

The parent never imports torch: contenders run in processes of their own, so that their memory and
their storage traffic can be read from outside, and they take turns in random order. Every figure is
shown with its lowest, middle and highest value, since disks are noisy.

Call order: `Settings(...)` -> `run(settings)` -> `render(report)`, `plot(report, path)`, `report.to_json()`.
"""

from __future__ import annotations

from ckpt_core.bench.contenders import NAMES, OURS
from ckpt_core.bench.plot import check_plot, plot
from ckpt_core.bench.results import Report
from ckpt_core.bench.rounds import run
from ckpt_core.bench.settings import Measure, ModelSize, Settings, Suite
from ckpt_core.bench.tables import render

__all__ = [
    "NAMES",
    "OURS",
    "Measure",
    "ModelSize",
    "Report",
    "Settings",
    "Suite",
    "check_plot",
    "plot",
    "render",
    "run",
]
