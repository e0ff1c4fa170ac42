"""The suite `ranks`: several processes that save together, and what many more of them would cost.

ways      how the ranks of a job save a state that they all hold, in turns, with 1, 2, 4 real processes
planning  who stores what, for 10,000 leaves and thousands of ranks
messages  commits through a real store, and a simulation of them with 10,000 ranks
"""

from __future__ import annotations

from ckpt_core.bench.ranks.settings import NAMES, RankMeasure, RankSettings
from ckpt_core.bench.ranks.suite import SUITE

__all__ = ["NAMES", "SUITE", "RankMeasure", "RankSettings"]
