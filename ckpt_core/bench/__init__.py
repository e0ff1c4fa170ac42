"""`ckpt-core bench`: this engine beside the other ways to save a PyTorch state, on the machine at hand.

    suite -> settings -> schedule, with a crew of processes -> report -> tables, plot, JSON

`suite.Suite` says what a suite is. The parent never imports torch: contenders run in processes of their own,
so that their memory and their storage traffic can be read from outside, and they take turns in random order.
Every figure is shown with its lowest, middle and highest value, since disks are noisy.

The suite `core` measures one process, `ranks` several that save together, `policy` what `Auto` makes of a
second job on the machine, `papers` figures of the papers, with the engine under presets, `device` the way
from a device to the host and back, `levels` that to further roots and back: see the module of each name.
Suites that measure an integration lie beside it, and are found by entry points: see `suites`.

Call order: `Settings(...)`, or that of another suite -> `run(settings)` -> `render(report)`,
`plot(report, path)`, `report.to_json()`; `write(report, folder)` for `papers`.
`Report.from_json` reads it again, and `draw_headline` makes one picture of it.
"""

from __future__ import annotations

from ckpt_core.bench.contenders import NAMES, OURS
from ckpt_core.bench.core import Measure, Settings
from ckpt_core.bench.device import DeviceMeasure, DeviceSettings
from ckpt_core.bench.headline import draw_headline, headline_table
from ckpt_core.bench.levels import LevelMeasure, LevelSettings
from ckpt_core.bench.papers import PapersMeasure, PapersSettings
from ckpt_core.bench.policy import PolicyMeasure, PolicySettings
from ckpt_core.bench.ranks import RankMeasure, RankSettings
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import ModelSize
from ckpt_core.bench.settings import RunSettings as AnySettings
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.suites import plot, render, run, suite_of, write

__all__ = [
    "NAMES",
    "OURS",
    "AnySettings",
    "DeviceMeasure",
    "DeviceSettings",
    "LevelMeasure",
    "LevelSettings",
    "Measure",
    "ModelSize",
    "PapersMeasure",
    "PapersSettings",
    "PolicyMeasure",
    "PolicySettings",
    "RankMeasure",
    "RankSettings",
    "Report",
    "Settings",
    "Suite",
    "draw_headline",
    "headline_table",
    "plot",
    "render",
    "run",
    "suite_of",
    "write",
]
