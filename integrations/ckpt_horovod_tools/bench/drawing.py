"""What a picture of the suite `horovod` shows: lines over the interval between saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ckpt_core.bench.plot import by_interval, finish, lines
from ckpt_core.bench.results import Make, Report, Unit
from ckpt_horovod_tools.bench.frequency import BOUND
from ckpt_horovod_tools.bench.tables import BY_INTERVAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """Which areas there is something to draw for."""
    intervals: list[int] = list(report.settings["intervals"])
    return [
        partial(_area(make), report=report, title=title, make=make)
        for title, make in BY_INTERVAL
        if any(report.stats(make(every)) for every in intervals)
    ]


def _area(make: Make) -> Callable[..., None]:
    return _overheads if make(1).unit is Unit.PERCENT else by_interval


def _overheads(area: Axes, *, report: Report, title: str, make: Make) -> None:
    """Differences may be below 0, which no logarithm shows; the dotted line is the bound."""
    lines(area, report=report, make=make, numbers=report.settings["intervals"])
    area.set_yscale("linear")
    area.minorticks_off()
    area.axhline(BOUND * 100, color="#333333", linewidth=0.8, linestyle=":")
    area.set_xlabel("steps between saves", fontsize=9)
    finish(area, title)
