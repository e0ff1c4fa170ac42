"""What a run finds: quantities, rows of values, and what blocks of iterations say. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ckpt_core.bench.results import Figure, Stats, Unit

THROUGHPUT = Figure("throughput", "Iterations per second", Unit.PER_S, higher_is_better=True)
SLOWDOWN = Figure("slowdown", "Iteration over one without checkpoints", Unit.TIMES)
PERSIST = Figure("persist", "From save to committed", Unit.SECONDS)
STALL = Figure("stall", "Training waits for a save", Unit.SECONDS)
INTERVAL = Figure("interval", "Smallest interval within the bound", Unit.STEPS)
AMPLIFICATION = Figure("write_amplification", "Bytes written / bytes of the state", Unit.TIMES)
QUANTITIES = {
    figure.key: figure for figure in (THROUGHPUT, SLOWDOWN, PERSIST, STALL, INTERVAL, AMPLIFICATION)
}


@dataclass(frozen=True, slots=True)
class Row(Stats):
    """A point of a picture, with a value for each round; `x` is where it lies, None for a bar."""

    quantity: Figure
    line: str
    x: float | None

    def to_json(self) -> dict[str, Any]:
        """With plain values, and what they come to."""
        return {
            "quantity": self.quantity.key,
            "unit": self.quantity.unit.value,
            "line": self.line,
            "x": self.x,
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "values": list(self.values),
        }


@dataclass(slots=True)
class Found:
    """The values of one part: quantity, line and place -> one for each round; in the order of the first."""

    values: dict[tuple[Figure, str, float | None], list[float]] = field(default_factory=dict)

    def add(self, quantity: Figure, line: str, x: float | None, value: float) -> None:
        """Note the value of one round."""
        self.values.setdefault((quantity, line, x), []).append(value)

    @property
    def rows(self) -> list[Row]:
        """All points."""
        return [Row(tuple(values), *point) for point, values in self.values.items()]

    def row(self, quantity: Figure, line: str, x: float | None = None) -> Row | None:
        """The one point; None where nothing was measured."""
        values = self.values.get((quantity, line, x))
        return None if values is None else Row(tuple(values), quantity, line, x)

    def median(self, quantity: Figure, line: str, x: float | None = None) -> float | None:
        """Of that point."""
        row = self.row(quantity, line, x)
        return None if row is None else row.median

    def of(self, quantity: Figure) -> list[Row]:
        """All points of a quantity."""
        return [row for row in self.rows if row.quantity == quantity]


def quantities(rows: Iterable[Row]) -> list[Figure]:
    """Those that were measured, in order."""
    return list(dict.fromkeys(row.quantity for row in rows))


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
