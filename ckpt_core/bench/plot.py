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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    machine = report.machine
    canvas.suptitle(
        f"{report.settings['state_bytes'] / 1e6:.0f} MB state, {report.settings['leaves']} leaves, "
        f"median of {report.settings['rounds']} rounds; whiskers: min, max; hatched: not fsynced\n"
        f"{machine.cpus} CPUs, {machine.filesystem} on {machine.disk}, torch {machine.torch}",
        fontsize=11,
    )
    # One legend for all areas of lines, below them: inside it would hide some of the lines.
    named = [area.get_legend_handles_labels() for area in axes if area.get_legend() is None]
    lines, labels = max(named, key=lambda pair: len(pair[1]), default=([], []))
    if labels:
        canvas.legend(lines, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    canvas.savefig(path, dpi=120)


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
        shown.append(Bar(name, read, f"{read.median:.3g}", _color(report, name)))
    drawn = bars(area, shown, logarithmic=logarithmic)
    for bar, (name, _) in zip(drawn, rows, strict=True):
        if not report.entrants[name].durable:
            bar.set(fill=False, hatch="////", edgecolor=_PEER_COLOR)
    better = "higher" if figure.higher_is_better else "lower"
    area.set_xlabel(f"{unit_name(figure)}, {better} is better", fontsize=9)
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
        area.annotate(
            bar.text, (bar.stats.max, number), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    highest = max(bar.stats.max for bar in shown)
    if logarithmic:
        area.set_xscale("log")
        area.set_xlim(min(bar.stats.min for bar in shown) / 3, highest * 3)
    else:
        area.set_xlim(0, highest * 1.15)
    return drawn


def lines(
    area: Axes, *, report: Report, make: Make, numbers: Sequence[int], base: int = 10
) -> None:
    """One line for each contender over some numbers, both axes logarithmic; `base` is of the lower one."""
    for number, name in enumerate(report.entrants):
        points = [
            (at, scaled(make(at), stats[name].median))
            for at in numbers
            if name in (stats := report.stats(make(at)))
        ]
        if points:
            area.plot(*zip(*points, strict=True), **line_style(number, name))
    area.set_xscale("log", base=base)
    area.set_xticks(numbers, [str(at) for at in numbers])
    area.set_yscale("log")
    area.set_ylabel(f"{unit_name(make(numbers[0]))}, lower is better", fontsize=9)


def finish_lines(area: Axes, title: str) -> None:
    """Title, readable ticks and no frame, once the scales are set."""
    log_ticks(area)
    finish(area, title)


def log_ticks(area: Axes) -> None:
    """Ticks that people read, at the side."""
    from matplotlib.ticker import LogLocator

    area.minorticks_off()
    area.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    area.yaxis.set_major_formatter("{x:g}")


def finish(area: Axes, title: str) -> None:
    """Title and no frame."""
    area.set_title(title, fontsize=10)
    area.tick_params(labelsize=8)
    area.spines[["top", "right"]].set_visible(False)


def line_style(number: int, name: str) -> dict[str, Any]:
    """How a contender's line looks; ours stands out."""
    ours = name == OURS
    return {
        "label": name,
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4.5,
        "color": _OURS_COLOR if ours else f"C{(number - 1) % 10}",
        "linewidth": 2.6 if ours else 1.1,
        "zorder": 3 if ours else 2,
    }


def _color(report: Report, name: str) -> str:
    if name == OURS:
        return _OURS_COLOR
    return _REFERENCE_COLOR if report.entrants[name].reference else _PEER_COLOR
