"""What a run finds: quantities, rows of values, and what blocks of iterations say. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Quantity:
    """What the values of some rows count.

    Attributes:
        key: name in the files.
        title: heading.
        unit: "1/s", "s", "x" or "steps".
        higher_is_better: direction.
        digits: that tables show.
    """

    key: str
    title: str
    unit: str
    higher_is_better: bool = False
    digits: int = 3


THROUGHPUT = Quantity("throughput", "Iterations per second", "1/s", higher_is_better=True)
SLOWDOWN = Quantity("slowdown", "Iteration over one without checkpoints", "x")
PERSIST = Quantity("persist", "From save to committed", "s")
STALL = Quantity("stall", "Training waits for a save", "s")
INTERVAL = Quantity("interval", "Smallest interval within the bound", "steps")
AMPLIFICATION = Quantity("write_amplification", "Bytes written / bytes of the state", "x", digits=4)
QUANTITIES = {
    quantity.key: quantity
    for quantity in (THROUGHPUT, SLOWDOWN, PERSIST, STALL, INTERVAL, AMPLIFICATION)
}


@dataclass(slots=True)
class Row:
    """A point of a figure, with a value for each round."""

    quantity: Quantity
    line: str
    x: float | None
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Middle value."""
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        """With plain values, and what they come to."""
        return {
            "quantity": self.quantity.key,
            "unit": self.quantity.unit,
            "line": self.line,
            "x": self.x,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": self.values,
        }


@dataclass(slots=True)
class Found:
    """The rows of one part, in the order in which they were first seen."""

    rows: list[Row] = field(default_factory=list)

    def add(self, quantity: Quantity, line: str, x: float | None, value: float) -> None:
        """Note the value of one round."""
        row = self.row(quantity, line, x)
        if row is None:
            row = Row(quantity, line, x)
            self.rows.append(row)
        row.values.append(value)

    def row(self, quantity: Quantity, line: str, x: float | None = None) -> Row | None:
        """The one point; None where nothing was measured."""
        wanted = (quantity, line, x)
        return next((row for row in self.rows if (row.quantity, row.line, row.x) == wanted), None)

    def median(self, quantity: Quantity, line: str, x: float | None = None) -> float | None:
        """Of that point."""
        row = self.row(quantity, line, x)
        return None if row is None else row.median

    def of(self, quantity: Quantity) -> list[Row]:
        """All points of a quantity."""
        return [row for row in self.rows if row.quantity == quantity]


def quantities(found: Found) -> list[Quantity]:
    """Those that were measured, in order."""
    return list(dict.fromkeys(row.quantity for row in found.rows))


def lines(rows: Sequence[Row]) -> list[str]:
    """Names of the lines, in order."""
    return list(dict.fromkeys(row.line for row in rows))


def places(rows: Sequence[Row]) -> list[float]:
    """Where the points lie, in rising order; empty for bars."""
    return sorted({row.x for row in rows if row.x is not None})


def per_s(block: Mapping[str, Any]) -> float:
    """Iterations per second over whole intervals, until the last checkpoint of them was durable."""
    return float(block["iterations"] / block["seconds"])


def slowdown(block: Mapping[str, Any], base_s: float) -> float:
    """Time of an iteration of the block over `base_s`, one without checkpoints."""
    return float(block["seconds"] / block["iterations"] / base_s)


def overhead_at(interval: float, points: Sequence[tuple[int, float]]) -> float:
    """Overhead between, below and above measured intervals.

    What a save costs is taken as constant outside the measured intervals, and in between as lying on
    a straight line: it falls where persisting no longer reaches into the next interval.

    Args:
        interval: steps between saves, 1 or more.
        points: interval and overhead (added time as a part of the time without) as measured, in rising
            order of intervals.
    """
    costs = [(at, overhead * at) for at, overhead in points]
    if interval <= costs[0][0]:
        return costs[0][1] / interval
    for (low, cheap), (high, dear) in pairwise(costs):
        if interval <= high:
            return (cheap + (dear - cheap) * (interval - low) / (high - low)) / interval
    return costs[-1][1] / interval


def smallest_interval(bound: float, points: Sequence[tuple[int, float]]) -> int:
    """The smallest interval such that it and all larger ones have an overhead of at most `bound`.

    See `overhead_at` for the arguments.
    """
    last, overhead = points[-1]
    # Above the measured ones the overhead falls with the interval, so this is where to look from.
    found = max(last, math.ceil(last * overhead / bound))
    while overhead_at(found, points) > bound:
        found += 1  # the quotient was rounded down
    while found > 1 and overhead_at(found - 1, points) <= bound:
        found -= 1
    return found
