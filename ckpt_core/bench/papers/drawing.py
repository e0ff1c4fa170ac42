"""A run of the suite `papers` as pictures and files: an area for each quantity, and files for each figure."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.papers.found import (
    SLOWDOWN,
    Row,
    lines,
    places,
    quantities,
)
from ckpt_core.bench.papers.tables import (
    Plain,
    digits,
    found_of,
    markdown,
    number_text,
    place_text,
    training_line,
)
from ckpt_core.bench.papers.ways import IDEAL, title
from ckpt_core.bench.plot import MARKERS, Bar, bars, finish, log_ticks
from ckpt_core.bench.results import Figure, Report, Unit
from ckpt_core.observe import check_plot
from ckpt_core.system.replacing import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = ("quantity", "unit", "line", "x", "median", "min", "max", "values")
_OURS = ("default", "pccheck")
_WIDE = 4.0
"""An axis is logarithmic from this ratio of its ends on."""

_DPI = 120


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """The areas of all figures."""
    return [area for part in report.more["papers"].values() for area in areas(part)]


def areas(part: Plain) -> list[Callable[[Axes], None]]:
    """The areas of one figure."""
    found = found_of(part)
    areas: list[Callable[[Axes], None]] = []
    for quantity in quantities(found.rows):
        rows = found.of(quantity)
        draw = _lines if places(rows) else _bars
        areas.append(partial(draw, part=part, quantity=quantity, rows=rows))
    return areas


def draw_part(report: Report, part: Plain, path: Path) -> None:
    """Write the picture of one figure; the suffix of `path` chooses the format.

    Raises:
        ConfigError: see `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure as Canvas

    found = areas(part)
    canvas = Canvas(figsize=(7.5 * max(1, len(found)), 5), layout="constrained")
    axes = canvas.subplots(1, max(1, len(found)), squeeze=False).flatten()
    for draw, area in zip(found, axes, strict=False):
        draw(area)
    machine = report.machine
    canvas.suptitle(
        f"{part['source']}, on {machine.cpus} CPUs, {machine.filesystem} on {machine.disk}\n"
        f"{training_line(report, part)}; whiskers: min, max",
        fontsize=9,
    )
    with replaced(path) as file:
        canvas.savefig(file, dpi=_DPI)


def _lines(area: Axes, *, part: Plain, quantity: Figure, rows: Sequence[Row]) -> None:
    """A line for each way, with whiskers; `ideal` is dotted."""
    at = places(rows)
    drawn = [line for line in lines(rows) if line != IDEAL]
    for number, line in enumerate([*drawn, IDEAL] if IDEAL in lines(rows) else drawn):
        points = sorted((row for row in rows if row.line == line), key=lambda row: row.x or 0.0)
        middles = [row.median for row in points]
        lower = [row.median - row.min for row in points]
        upper = [row.max - row.median for row in points]
        where = [row.x or 0.0 for row in points]
        area.errorbar(
            where, middles, yerr=[lower, upper], label=title(line), **_style(number, line)
        )
    if at[-1] / at[0] > _WIDE:
        area.set_xscale("log")
    area.set_xticks(at, [place_text(x, part["axis"]) for x in at])
    area.minorticks_off()
    _scale(area, rows)
    if quantity == SLOWDOWN:
        area.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    area.set_xlabel(part["axis"], fontsize=9)
    _finish(area, part, quantity)
    area.set_ylabel(_unit(quantity), fontsize=9)
    area.legend(fontsize=8, frameon=False)


def _bars(area: Axes, *, part: Plain, quantity: Figure, rows: Sequence[Row]) -> None:
    """A bar for each way, the first on top, with its median beside it."""
    shown = [
        Bar(title(row.line), row, number_text(row.median, digits(row.quantity)), "#7c8aa0")
        for row in rows
    ]
    highest, lowest = max(row.max for row in rows), min(row.min for row in rows)
    bars(area, shown, logarithmic=lowest > 0 and highest / lowest > _WIDE)
    area.invert_yaxis()
    _finish(area, part, quantity)
    area.set_xlabel(_unit(quantity), fontsize=9)


def _scale(area: Axes, rows: Sequence[Row]) -> None:
    middles = [row.median for row in rows]
    if min(middles) > 0 and max(middles) / min(middles) > _WIDE:
        area.set_yscale("log")
        log_ticks(area.yaxis)
    else:
        area.set_ylim(bottom=0)


def _finish(area: Axes, part: Plain, quantity: Figure) -> None:
    finish(area, f"{part['title']}\n{quantity.title}")


def _unit(quantity: Figure) -> str:
    better = "higher" if quantity.higher_is_better else "lower"
    unit = {Unit.TIMES: "times"}.get(quantity.unit, quantity.unit)
    return f"{unit}, {better} is better"


def _style(number: int, line: str) -> dict[str, Any]:
    if line == IDEAL:
        return {"color": "#333333", "linestyle": ":", "linewidth": 1.2}
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4.5,
        "color": f"C{number % 10}",
        "linewidth": 2.4 if line in _OURS else 1.1,
        "elinewidth": 0.8,
        "capsize": 2,
    }


def write(report: Report, folder: Path) -> None:
    """Write `<paper>-<figure>.png` and `.csv` for each figure, and `tables.md`; existing ones are replaced.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    folder.mkdir(exist_ok=True)
    for part in report.more["papers"].values():
        _write_csv(part, folder / f"{part['file']}.csv")
        draw_part(report, part, folder / f"{part['file']}.png")
    with replaced(folder / "tables.md") as file:
        file.write_text(markdown(report))


def _write_csv(part: Plain, path: Path) -> None:
    """A row for each point; its values, one for each round, are separated by spaces."""
    with replaced(path) as fresh, fresh.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        for row in part["rows"]:
            values = " ".join(f"{value:.6g}" for value in row["values"])
            rows.writerow([*(row[column] for column in _COLUMNS[:-1]), values])
