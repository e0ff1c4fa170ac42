"""What a picture of the suite `deepspeed` shows: bars of one save and lines over the interval, by stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ckpt_core.bench.plot import bars_of, by_interval
from ckpt_core.bench.results import Report
from ckpt_deepspeed_tools.bench import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = (figures.call, figures.stall, figures.durable, figures.memory)


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """Which areas there is something to draw for."""
    found: list[Callable[[Axes], None]] = []
    stages: list[int] = list(report.settings["stages"])
    for make in _BARS:
        shown = [make(stage) for stage in stages]
        # A stall has differences in it, and may be 0.
        found += [bars_of(report, figure, False) for figure in shown if report.stats(figure)]
    every: int = report.settings["intervals"][0]
    for stage in stages:
        if report.stats(figures.slowdown(stage, every)):
            found.append(partial(_slowdown, report=report, stage=stage))
    return found


def _slowdown(area: Axes, *, report: Report, stage: int) -> None:
    title = f"ZeRO {stage}: training step over the same without saves"
    by_interval(area, report=report, title=title, make=partial(figures.slowdown, stage))
    area.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
