"""What a picture of the suite `lightning` shows: lines over the interval, bars for the large state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ckpt_core.bench.plot import bars_of, by_interval
from ckpt_core.bench.results import Report
from ckpt_lightning_tools.bench import figures
from ckpt_lightning_tools.bench.tables import BY_INTERVAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = (
    (figures.LARGE_STALL, True),
    (figures.LARGE_LONGEST, False),
    (figures.LARGE_FIT, False),
    (figures.LARGE_MEMORY, False),
)


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """Which areas there is something to draw for."""
    intervals: list[int] = list(report.settings["intervals"])
    found: list[Callable[[Axes], None]] = [
        partial(by_interval, report=report, title=title, make=make)
        for title, make in BY_INTERVAL
        if any(report.stats(make(every)) for every in intervals)
    ]
    found += [
        bars_of(report, figure, logarithmic)
        for figure, logarithmic in _BARS
        if report.stats(figure)
    ]
    return found
