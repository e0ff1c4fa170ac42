"""What `simulate` found, as a picture. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.observe import check_plot
from ckpt_core.simulate import Strategy
from ckpt_core.system.replacing import replaced
from ckpt_core.units import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ckpt_core.simulate import Point, Study

_MARKERS = "os^vDP*X"


def plot_points(points: Sequence[Point], study: Study, path: Path) -> None:
    """Goodput against interval; or against the mean time between failures, where there are several.

    Of a run to a number of iterations it is the total time instead.

    Raises:
        ConfigError: see `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7.5, 4.6), layout="constrained")
    area = canvas.subplots()
    for k, strategy in enumerate(study.strategies):
        _line(area, points, strategy, study, marker=_MARKERS[k % len(_MARKERS)])
    by_rate = len(study.mtbfs_s) > 1
    area.set_xscale("log")
    area.minorticks_off()
    if by_rate:
        area.set_xticks(study.mtbfs_s, [time_text(mtbf_s) for mtbf_s in study.mtbfs_s])
    else:
        intervals = sorted({point.interval for point in points})
        area.set_xticks(intervals, [str(interval) for interval in intervals])
    area.set_xlabel("mean time between failures" if by_rate else "iterations between saves")
    total = study.goal.iterations is not None
    area.set_ylabel("total training time, hours" if total else "iterations that count, each second")
    area.set_ylim(bottom=0)
    area.grid(alpha=0.3)
    area.legend(fontsize=8, frameon=False)
    with replaced(path) as file:
        canvas.savefig(file, dpi=110)


def _line(
    area: Axes, points: Sequence[Point], strategy: Strategy, study: Study, *, marker: str
) -> None:
    """The best interval at each failure rate, or each interval at the only one; with the best levels."""
    mine = [point for point in points if point.strategy is strategy]
    if len(study.mtbfs_s) > 1:
        best = [
            max((p for p in mine if p.mtbf_s == mtbf_s), key=lambda p: p.goodput)
            for mtbf_s in study.mtbfs_s
        ]
        x = [point.mtbf_s or 0.0 for point in best]
    else:
        best = [
            max((p for p in mine if p.interval == interval), key=lambda p: p.goodput)
            for interval in sorted({point.interval for point in mine})
        ]
        x = [float(point.interval) for point in best]
    total = study.goal.iterations is not None
    y = [point.wall_s / 3600 if total else point.goodput for point in best]
    style = {"ours": "-", "ideal": ":"}.get(strategy.value, "--")
    width = 2.4 if strategy is Strategy.OURS else 1.2
    area.plot(x, y, style, marker=marker, label=strategy.label, markersize=4, linewidth=width)
