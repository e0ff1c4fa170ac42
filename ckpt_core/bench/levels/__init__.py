"""The suite `levels`: what further levels cost training, and how fast steps go to a store and come back.

    sink        an object store on loopback, in a process of its own; keeps in memory what it is given
    worker      one process for each way: this engine with its agent, `obstore` alone, what users do today
    nodes       ranks with a root and an agent each, which keep one another's steps; node_worker: one of them
    settings    ways, measures
    suite       schedule
    figures     what is told of each way

Loopback has no network's latency and no server's speed: figures say what this end costs.
"""

from __future__ import annotations

from ckpt_core.bench.levels.settings import LevelMeasure, LevelSettings
from ckpt_core.bench.levels.suite import SUITE

__all__ = ["SUITE", "LevelMeasure", "LevelSettings"]
