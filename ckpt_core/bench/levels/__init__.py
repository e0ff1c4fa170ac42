"""The suite `levels`: what further levels cost training, and how fast steps go to a store and come back.

    sink        an object store on loopback, in a process of its own; keeps in memory what it is given
    worker      one process for each way: this engine with its agent, `obstore` alone, what users do today
    suite       settings, schedule
    figures     what is told of each way

Loopback has no network's latency and no server's speed: figures say what this end costs.
"""

from __future__ import annotations

from ckpt_core.bench.levels.suite import SUITE, LevelMeasure, LevelSettings

__all__ = ["SUITE", "LevelMeasure", "LevelSettings"]
