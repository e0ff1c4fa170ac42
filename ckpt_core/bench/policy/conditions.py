"""The conditions that are compared. Pure values: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    ALONE: Condition("Auto, alone on the machine", adapts=True, disturbed=False),
    FIXED: Condition("the interval that was right alone", adapts=False, disturbed=True),
    ADAPTIVE: Condition("Auto, which finds the job begin", adapts=True, disturbed=True),
}
"""In the order of the run: the second needs what the first has found."""

NAMES = tuple(CONDITIONS)
