"""What is measured in each condition, one value for each round."""

from __future__ import annotations

from ckpt_core.bench.results import Figure, Unit

OVERHEAD = Figure("overhead", "Overhead over iterations without saves", Unit.PERCENT)
TOLD = Figure("told_overhead", "Overhead that Auto itself reports", Unit.PERCENT)
ITERATION = Figure("iteration", "Iteration without saves", Unit.SECONDS)
INTERVAL = Figure("interval", "Interval", Unit.STEPS)
SETTLED = Figure(
    "settled_overhead", "Overhead from 20 iterations of a new load on, by its saves", Unit.PERCENT
)
COST = Figure("cost", "What one save adds to training", Unit.SECONDS)
REACTION = Figure(
    "reaction", "Iterations of a new load until those that follow are within the bound", Unit.STEPS
)
