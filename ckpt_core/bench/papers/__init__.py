"""The suite `papers`: figures of PCcheck, LightCheck and CheckFreq on the machine at hand, at its scale.

One engine under presets stands for the papers' systems, and `torch.save` with fsync for itself. Training is
a stand-in: a state of a given size, whose iterations sleep as a host does beside a GPU, so that the ratio
of an iteration to the time to persist can be the papers'. A filesystem in memory stands for persistent
memory.

    settings -> parts (which ways a figure compares) -> suite (one `worker` process) -> found

Source: PCcheck (ASPLOS '25) figures 8 and 11 to 14; LightCheck (ICCD '23) table I and figure 11; CheckFreq
(FAST '21), Breakdown of Benefits.
"""

from __future__ import annotations

from ckpt_core.bench.papers.settings import PapersMeasure, PapersSettings
from ckpt_core.bench.papers.suite import SUITE

__all__ = ["SUITE", "PapersMeasure", "PapersSettings"]
