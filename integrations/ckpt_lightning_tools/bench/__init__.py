"""The suite `lightning`: the same training under Lightning, with each of its ways to save, and with none.

    train  a small model, a save every 1, 5, 10, 25, 50 steps: slowdown, stall, end-to-end time, memory
    save   a large state, three saves: stall, the longest step, end-to-end time, memory
    resume the large state: the time from the call until the first step

Each way runs in a process of its own, which is the only place where Lightning and `ckpt_lightning` are
imported; where they are missing, the report says how to install them.
"""

from __future__ import annotations

from ckpt_lightning_tools.bench.suite import NAMES, SUITE, LightningSettings

__all__ = ["NAMES", "SUITE", "LightningSettings"]
