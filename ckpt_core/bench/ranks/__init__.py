"""The suite `ranks`: several processes that save together, and what many more of them would cost.

    ways      how the ranks of a job save a state that they all hold, in turns, with 1, 2, 4 real processes
    planning  who stores what, for 10,000 leaves and thousands of ranks
    messages  commits through a real store, and a simulation of them with 10,000 ranks

Call order: `RankSettings(...)` -> `run(settings)` -> `render(report)`, `drawings(report)`.
"""

from __future__ import annotations

from ckpt_core.bench.ranks.drawing import drawings
from ckpt_core.bench.ranks.rounds import run
from ckpt_core.bench.ranks.settings import RankMeasure, RankSettings
from ckpt_core.bench.ranks.tables import render
from ckpt_core.bench.ranks.ways import NAMES

__all__ = ["NAMES", "RankMeasure", "RankSettings", "drawings", "render", "run"]
