"""The suite `papers`: figures of PCcheck, LightCheck and CheckFreq on the machine at hand, at its scale.

One engine under presets stands for the papers' systems, and `torch.save` with fsync for itself. Training is
a stand-in: a state of a given size, whose iterations sleep as a host does beside a GPU, so that the ratio
of an iteration to the time to persist can be the papers'. A filesystem in memory stands for persistent
memory.

    settings -> parts (which ways a figure compares) -> rounds (one `worker` process for each part) -> found

Call order: `PapersSettings(...)` -> `run(settings)` -> `render(report)`, `drawings(report)`,
`write(report, folder)`.

Source: PCcheck (ASPLOS '25) figures 8 and 11 to 14; LightCheck (ICCD '23) table I and figure 11; CheckFreq
(FAST '21), Breakdown of Benefits.
"""

from __future__ import annotations

from ckpt_core.bench.papers.drawing import drawings
from ckpt_core.bench.papers.files import write
from ckpt_core.bench.papers.rounds import run
from ckpt_core.bench.papers.settings import PapersMeasure, PapersSettings
from ckpt_core.bench.papers.tables import render

__all__ = ["PapersMeasure", "PapersSettings", "drawings", "render", "run", "write"]
