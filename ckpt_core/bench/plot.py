"""A run as one picture. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Figure, Make, Report, Stats
from ckpt_core.bench.tables import scaled, unit_name
from ckpt_core.observe import check_plot
from ckpt_core.system.replacing import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.container import BarContainer

_OURS_COLOR = "#c2410c"
_PEER_COLOR = "#7c8aa0"
_REFERENCE_COLOR = "#c9ced6"
MARKERS = "osD^vP*Xphd<>"


def draw(report: Report, path: Path, drawings: Sequence[Callable[[Axes], None]]) -> None:
    """Write the picture of these areas; the suffix of `path` chooses the format.

    Raises:
        ConfigError: see `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure as Canvas

    rows = max(1, -(-len(drawings) // 2))
    canvas = Canvas(figsize=(14, 0.8 + 4.4 * rows), layout="constrained")
    axes = canvas.subplots(rows, 2, squeeze=False).flatten()
    for draw, area in zip(drawings, axes, strict=False):
        draw(area)
    for area in axes[len(drawings) :]:
        area.set_axis_off()
    canvas.suptitle(_head(report), fontsize=11)
    with replaced(path) as file:
        canvas.savefig(file, dpi=120)


def _head(report: Report) -> str:
    """What was saved, how to read the picture, and where it ran."""
    settings, machine = report.settings, report.machine
    size = f"{settings['state_bytes'] / 1e6:,.0f} MB state"
    leaves = f", {settings['leaves']:,} leaves" if settings["leaves"] else ""
    weak = any(not entrant.durable and entrant.fsyncs for entrant in report.entrants.values())
    hatched = "; hatched: a power cut may lose what was saved" if weak else ""
    return (
        f"{size}{leaves}, median of {settings['rounds']} rounds; whiskers: lowest, highest{hatched}\n"
        f"{machine.cpus} CPUs, {machine.filesystem} on {machine.disk}, torch {machine.torch}, "
        f"{machine.date[:10]}"
    )


def bars_of(report: Report, figure: Figure, logarithmic: bool) -> Callable[[Axes], None]:
    """The area of one figure: a bar for each contender."""
    return lambda area: _bars(area, report, figure, logarithmic=logarithmic)


def _bars(area: Axes, report: Report, figure: Figure, *, logarithmic: bool) -> None:
    """One bar for each contender, the best on top, with its median written beside it."""
    rows = sorted(
        report.stats(figure).items(),
        key=lambda row: row[1].median,
        reverse=not figure.higher_is_better,
    )
    shown = []
    for name, stats in rows:
        read = Stats(tuple(scaled(figure, value) for value in stats.values))
        shown.append(Bar(report.title(name), read, short(read.median), color_of(report, name)))
    drawn = bars(area, shown, logarithmic=logarithmic)
    for bar, (name, _) in zip(drawn, rows, strict=True):
        if not report.entrants[name].durable:
            bar.set(fill=False, hatch="////", edgecolor=_PEER_COLOR)
    better = "higher" if figure.higher_is_better else "lower"
    area.set_xlabel(f"{_axis_unit(figure)}, {better} is better", fontsize=9)
    finish(area, figure.title)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its values as people read them, the text at its end, its colour."""

    name: str
    stats: Stats
    text: str
    color: str


def bars(area: Axes, shown: Sequence[Bar], *, logarithmic: bool) -> BarContainer:
    """Bars from the bottom up, with whiskers and texts."""
    drawn = area.barh(
        [bar.name for bar in shown],
        [bar.stats.median for bar in shown],
        xerr=[
            [bar.stats.median - bar.stats.min for bar in shown],
            [bar.stats.max - bar.stats.median for bar in shown],
        ],
        color=[bar.color for bar in shown],
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
    )
    for number, bar in enumerate(shown):
        _beside(area, number, bar.stats.max, bar.text)
    highest = max(bar.stats.max for bar in shown)
    if logarithmic:
        area.set_xscale("log")
        area.set_xlim(min(bar.stats.min for bar in shown) / 3, highest * 3)
        log_ticks(area.xaxis)
    else:
        area.set_xlim(0, highest * 1.15)
        area.xaxis.set_major_formatter("{x:,.10g}")
    return drawn


def _beside(area: Axes, number: int, end: float, text: str) -> None:
    area.annotate(
        text, (end, number), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8
    )


def dots(area: Axes, *, report: Report, make: Make, numbers: Sequence[int], title: str) -> None:
    """A row for each way, the best on top, with a point for each number, and the highest value beside it.

    Args:
        area: to draw into.
        report: has the values.
        make: the figure at a number.
        numbers: in order; all are in the legend.
        title: of the legend.
    """
    found = {at: report.stats(make(at)) for at in numbers}
    rows = {
        name: {
            at: scaled(make(at), stats[name].median) for at, stats in found.items() if name in stats
        }
        for name in report.entrants
    }
    ordered = sorted((row for row in rows.items() if row[1]), key=lambda row: -max(row[1].values()))
    for number, (name, points) in enumerate(ordered):
        highest = max(points.values())
        ends = (min(points.values()), highest)
        area.plot(ends, (number, number), color=_REFERENCE_COLOR, linewidth=1.2, zorder=1)
        for place, at in enumerate(numbers):
            if at in points:
                style = _dot_style(place, len(numbers), color_of(report, name))
                area.plot(points[at], number, linestyle="", **style)
        _beside(area, number, highest, short(highest))
    area.set_yticks(range(len(ordered)), [report.title(name) for name, _ in ordered])
    for place, at in enumerate(numbers):
        style = _dot_style(place, len(numbers), _PEER_COLOR)
        area.plot([], [], linestyle="", label=str(at), **style)
    # The best are on top, and low: that corner is free.
    area.legend(fontsize=8, frameon=False, loc="upper right", title=title, title_fontsize=8)
    area.set_xlabel(f"{_axis_unit(make(numbers[0]))}, lower is better", fontsize=9)


def _dot_style(place: int, count: int, color: str) -> dict[str, Any]:
    """The first of the numbers is full, the last one a ring, since they often lie on each other."""
    from matplotlib.colors import to_rgba

    alpha = 1 - place / max(1, count - 1)
    face = to_rgba(color, alpha)
    return {
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 6,
        "markerfacecolor": face,
        "markeredgecolor": color,
        "zorder": 2 + count - place,
    }


def log_ticks(axis: Axis) -> None:
    """Ticks that people read, on an axis that is logarithmic."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,.10g}")


def finish(area: Axes, title: str) -> None:
    """Title and no frame."""
    area.set_title(title, fontsize=10)
    area.tick_params(labelsize=8)
    area.spines[["top", "right"]].set_visible(False)


def short(value: float) -> str:
    """Three digits, all of a large number, and never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _axis_unit(figure: Figure) -> str:
    return {"x": "times", "us": "µs"}.get(unit_name(figure), unit_name(figure))


def color_of(report: Report, name: str) -> str:
    """Ours stands out, and references stand back."""
    if name == OURS:
        return _OURS_COLOR
    return _REFERENCE_COLOR if report.entrants[name].reference else _PEER_COLOR
