"""What a picture of the suite `lightning` shows: lines over the interval, bars for the large state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ckpt_core.bench.lightning import figures
from ckpt_core.bench.lightning.tables import BY_INTERVAL
from ckpt_core.bench.plot import bars_of, line_style
from ckpt_core.bench.results import Report
from ckpt_core.bench.tables import scaled, unit_name

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
        partial(_lines, report=report, title=title, make=make)
        for title, make in BY_INTERVAL
        if any(report.stats(make(every)) for every in intervals)
    ]
    found += [
        bars_of(report, figure, logarithmic)
        for figure, logarithmic in _BARS
        if report.stats(figure)
    ]
    return found


def _lines(area: Axes, *, report: Report, title: str, make: figures.Make) -> None:
    from matplotlib.ticker import LogLocator

    intervals: list[int] = list(report.settings["intervals"])
    for number, name in enumerate(report.entrants):
        points = [
            (every, scaled(make(every), stats[name].median))
            for every in intervals
            if name in (stats := report.stats(make(every)))
        ]
        if points:
            area.plot(*zip(*points, strict=True), **line_style(number, name))
    area.set_xscale("log")
    area.set_xticks(intervals, [str(every) for every in intervals])
    area.set_yscale("log")
    area.minorticks_off()
    area.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    area.yaxis.set_major_formatter("{x:g}")
    area.set_title(title, fontsize=10)
    area.set_xlabel("steps between saves", fontsize=9)
    area.set_ylabel(f"{unit_name(make(intervals[0]))}, lower is better", fontsize=9)
    area.tick_params(labelsize=8)
    area.spines[["top", "right"]].set_visible(False)
