"""A run as one picture. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench import results
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Figure, Report, Stats
from ckpt_core.bench.tables import scaled, unit_name
from ckpt_core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS_COLOR = "#c2410c"
_PEER_COLOR = "#7c8aa0"
_REFERENCE_COLOR = "#c9ced6"
_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^vP*Xphd<>"


def check_plot(path: Path) -> None:
    """Raise when `draw` could not write `path`.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the suffix.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'ckpt-core[bench]'")
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path.name!r} is no picture: end it in {', '.join(_SUFFIXES)}")


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


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """Which areas there is something to draw for."""
    found: list[Callable[[Axes], None]] = []
    for figure, logarithmic in (
        (results.PERSIST, False),
        (results.STALL, True),
        (results.RESTORE_COLD, False),
        (results.RESTORE_WARM, False),
        (results.MEMORY, False),
        (results.LEAVES_STALL, True),
    ):
        if report.stats(figure):
            found.append(bars_of(report, figure, logarithmic))
    intervals: list[int] = list(report.settings["intervals"])
    if any(report.stats(results.slowdown(every)) for every in intervals):
        found.append(lambda area: _lines(area, report, results.slowdown))
        found.append(lambda area: _lines(area, report, results.train_stall))
    return found


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
    area.set_title(figure.title, fontsize=10)
    area.set_xlabel(f"{unit_name(figure)}, {better} is better", fontsize=9)
    area.tick_params(labelsize=8)
    area.spines[["top", "right"]].set_visible(False)


def _whiskers(figure: Figure, rows: list[Stats]) -> list[list[float]]:
    return [
        [scaled(figure, stats.median - stats.min) for stats in rows],
        [scaled(figure, stats.max - stats.median) for stats in rows],
    ]


def _lines(area: Axes, report: Report, make: Callable[[int], Figure]) -> None:
    """One line for each contender over the interval between saves."""
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
    area.set_yscale("log")
    if make is results.slowdown:
        area.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
        title = "Training step time over no saves"
    else:
        title = "Stall of a save in training"
    area.set_xscale("log")
    area.set_xticks(intervals, [str(every) for every in intervals])
    area.minorticks_off()
    area.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    area.yaxis.set_major_formatter("{x:g}")
    figure = make(intervals[0])
    area.set_title(title, fontsize=10)
    area.set_xlabel("steps between saves", fontsize=9)
    area.set_ylabel(f"{unit_name(figure)}, lower is better", fontsize=9)
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
