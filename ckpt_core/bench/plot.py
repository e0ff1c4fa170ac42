"""A run as one picture. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Figure, Make, Report, Stats
from ckpt_core.bench.tables import scaled, unit_name
from ckpt_core.observe import check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS_COLOR = "#c2410c"
_PEER_COLOR = "#7c8aa0"
_REFERENCE_COLOR = "#c9ced6"
_MARKERS = "osD^vP*Xphd<>"


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
    names = [name for name, _ in rows]
    medians = [scaled(figure, stats.median) for _, stats in rows]
    bars = area.barh(
        names,
        medians,
        xerr=_whiskers(figure, [stats for _, stats in rows]),
        color=[_color(report, name) for name in names],
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
    )
    for bar, name in zip(bars, names, strict=True):
        if not report.entrants[name].durable:
            bar.set(fill=False, hatch="////", edgecolor=_PEER_COLOR)
    highest = max(scaled(figure, stats.max) for _, stats in rows)
    lowest = min(scaled(figure, stats.min) for _, stats in rows)
    for index, (_, stats) in enumerate(rows):
        end = scaled(figure, stats.max)
        text = f"{scaled(figure, stats.median):.3g}"
        area.annotate(
            text, (end, index), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )
    if logarithmic:
        area.set_xscale("log")
        area.set_xlim(lowest / 3, highest * 3)
    else:
        area.set_xlim(0, highest * 1.15)
    better = "higher" if figure.higher_is_better else "lower"
    area.set_xlabel(f"{unit_name(figure)}, {better} is better", fontsize=9)
    finish(area, figure.title)


def _whiskers(figure: Figure, rows: list[Stats]) -> list[list[float]]:
    return [
        [scaled(figure, stats.median - stats.min) for stats in rows],
        [scaled(figure, stats.max - stats.median) for stats in rows],
    ]


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
    from matplotlib.ticker import LogLocator

    area.minorticks_off()
    area.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    area.yaxis.set_major_formatter("{x:g}")
    finish(area, title)


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
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4.5,
        "color": _OURS_COLOR if ours else f"C{(number - 1) % 10}",
        "linewidth": 2.6 if ours else 1.1,
        "zorder": 3 if ours else 2,
    }


def _color(report: Report, name: str) -> str:
    if name == OURS:
        return _OURS_COLOR
    return _REFERENCE_COLOR if report.entrants[name].reference else _PEER_COLOR
