"""The conditions that are compared, and what is measured in each: one value for each round. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.bench.results import Figure, Unit

ALONE = "auto_alone"
FIXED = "fixed_beside_job"
ADAPTIVE = "auto_beside_job"


@dataclass(frozen=True, slots=True)
class Condition:
    """What a reader must know about one of them.

    Attributes:
        title: in words.
        adapts: `Auto` decides; else the interval is the one that `Auto` has found alone.
        disturbed: a second job takes cores and disk.
    """

    title: str
    adapts: bool
    disturbed: bool


CONDITIONS = {
    ALONE: Condition("Auto, alone", adapts=True, disturbed=False),
    FIXED: Condition("fixed interval, beside a job", adapts=False, disturbed=True),
    ADAPTIVE: Condition("Auto, beside a job", adapts=True, disturbed=True),
}
"""In the order of the run: the second needs what the first has found."""

NAMES = tuple(CONDITIONS)

OVERHEAD = Figure("overhead", "Overhead over iterations without saves", Unit.PERCENT)
TOLD = Figure("told_overhead", "Overhead that Auto itself reports", Unit.PERCENT)
ITERATION = Figure("iteration", "Iteration without saves", Unit.SECONDS)
INTERVAL = Figure("interval", "Interval", Unit.STEPS)
SETTLED = Figure(
    "settled_overhead", "Overhead from 20 iterations of a new load on, by its saves", Unit.PERCENT
)
COST = Figure("cost", "What one save adds to training", Unit.SECONDS)
ADDED = Figure(
    "reaction_by_saves",
    "Iterations of a new load until what saves add to those that follow is within the bound",
    Unit.STEPS,
)
COUNTED = Figure(
    "reaction_by_number",
    "Iterations of a new load until the saves that follow, by their number, are within the bound",
    Unit.STEPS,
)
REACTION = Figure(
    "reaction", "Iterations of a new load until those that follow are within the bound", Unit.STEPS
)
