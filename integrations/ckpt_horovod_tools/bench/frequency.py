"""How often each way can save within a bound on its overhead.

Source: LightCheck (ICCD '23) Table I, which has the intervals that keep the overhead below 5 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt_core.bench.results import Report
from ckpt_horovod_tools.bench.ways import BASES, ITERATION, overhead

BOUND = 0.05


@dataclass(frozen=True, slots=True)
class Frequency:
    """The shortest interval of one way that stays below the bound.

    Attributes:
        base: what the overhead is over.
        measured: the shortest measured interval from which on every measured one stays below; None if the
            longest does not.
        longest: the longest measured interval.
        predicted: the shortest that the cost of a save predicts, between the measured ones.
        save_s: what one save costs training, at `measured`, or at the longest interval.
    """

    base: str
    measured: int | None
    longest: int
    predicted: int
    save_s: float


def frequencies(report: Report, name: str) -> list[Frequency]:
    """Over each base of which the report has overheads of this way."""
    found = [_over(report, name, base) for base in BASES]
    return [frequency for frequency in found if frequency is not None]


def _over(report: Report, name: str, base: str) -> Frequency | None:
    overheads = _medians(report, name, base)
    if not overheads:
        return None
    measured: int | None = None
    failed = 0
    for interval in sorted(overheads, reverse=True):
        if overheads[interval] >= BOUND:
            failed = interval
            break
        measured = interval
    at = measured or max(overheads)
    # One save, counted in iterations without saves.
    cost = overheads[at] * at
    # What was measured to be too short stays too short, whatever saves at longer intervals cost.
    predicted = max(math.ceil(cost / BOUND), failed + 1)
    base_s = report.stats(ITERATION(at))[base].median
    return Frequency(base, measured, max(overheads), predicted, cost * base_s)


def _medians(report: Report, name: str, base: str) -> dict[int, float]:
    medians: dict[int, float] = {}
    for interval in report.settings["intervals"]:
        stats = report.stats(overhead(interval, base)).get(name)
        if stats is not None:
            medians[interval] = stats.median
    return medians
