"""A run of the suite `papers` as tables: for a terminal, as markdown, and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ckpt_core.bench.papers.comparing import compare
from ckpt_core.bench.papers.found import (
    AMPLIFICATION,
    QUANTITIES,
    Found,
    Row,
    lines,
    places,
    quantities,
)
from ckpt_core.bench.papers.parts import Part
from ckpt_core.bench.papers.settings import PapersSettings
from ckpt_core.bench.papers.ways import title
from ckpt_core.bench.results import Figure, Report
from ckpt_core.bench.tables import machine_line, text_table

_WORDS = ("where in the paper", "remark")
_BYTES_AXIS = "bytes of the state"
Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def part_json(part: Part, found: Found, settings: PapersSettings) -> Plain:
    """What the report has of a part; everything else is made from this."""
    return {
        "file": part.file,
        "title": part.title,
        "source": part.source,
        "axis": part.axis,
        "rows": [row.to_json() for row in found.rows],
        "comparison": [
            {**asdict(row), "ratio": row.ratio} for row in compare(found, part.measure, settings)
        ],
    }


def found_of(part: Plain) -> Found:
    """The points of a part of the report."""
    rows = part["rows"]
    return Found(
        {(QUANTITIES[row["quantity"]], row["line"], row["x"]): row["values"] for row in rows}
    )


def tables(report: Report) -> Iterator[Table]:
    """Everything that a run found."""
    for part in report.more["papers"].values():
        for grid in grids(part):
            left = (grid.heads[0], *_WORDS)
            yield text_table(grid.title, grid.heads, grid.rows, left=left)


def training_line(report: Report, part: Plain | None = None) -> str:
    """What trained, in all parts or in one, whose sizes may be on its axis."""
    settings = report.settings
    if part is not None and part["axis"] == _BYTES_AXIS:
        return f"{settings['leaves']} leaves, {settings['rounds']} rounds in random order"
    return (
        f"state {settings['state_bytes'] / 1e6:.0f} MB in {settings['leaves']} leaves, iterations of "
        f"{settings['iteration_s'] * 1e3:g} ms asleep, {settings['rounds']} rounds in random order"
    )


def markdown(report: Report) -> str:
    """All tables, each part under its name, to be pasted into a page."""
    parts = [f"{machine_line(report)}; {training_line(report)}."]
    for name, part in report.more["papers"].items():
        parts.append(f"## {name}\n\n{part['source']}")
        parts += [_markdown(grid) for grid in grids(part)]
    return "\n\n".join(parts) + "\n"


def grids(part: Plain) -> Iterator[Grid]:
    """The tables of one part: a table for each quantity, and one of all whose points have no place."""
    found = found_of(part)
    rows = found.rows
    placed = [quantity for quantity in quantities(rows) if places(found.of(quantity))]
    for quantity in placed:
        yield _by_place(part, quantity, found.of(quantity))
    bars = [row for row in rows if row.quantity not in placed]
    if bars:
        yield _of_bars(part, found, bars)
    if part["comparison"]:
        yield _comparison(part)


def _by_place(part: Plain, quantity: Figure, rows: Sequence[Row]) -> Grid:
    at = places(rows)
    cells = {(row.line, row.x): cell(row) for row in rows}
    return Grid(
        f"{part['title']}: {quantity.title}, {quantity.unit} over {part['axis']}, median (min-max)",
        ["way", *(place_text(x, part["axis"]) for x in at)],
        [[title(line), *(cells.get((line, x), "") for x in at)] for line in lines(rows)],
    )


def _of_bars(part: Plain, found: Found, bars: Sequence[Row]) -> Grid:
    columns = quantities(bars)
    rows = []
    for line in lines(bars):
        points = [found.row(quantity, line) for quantity in columns]
        rows.append([title(line), *("" if point is None else cell(point) for point in points)])
    heads = [f"{quantity.title}, {quantity.unit}" for quantity in columns]
    return Grid(f"{part['title']}: median (min-max)", ["way", *heads], rows)


def _comparison(part: Plain) -> Grid:
    rows = [
        [
            title(row["what"]),
            "" if row["paper"] is None else number_text(row["paper"]),
            number_text(row["ours"]),
            row["source"],
            row["note"],
        ]
        for row in part["comparison"]
    ]
    heads = ["what", "paper", "ours", "where in the paper", "remark"]
    return Grid(f"{part['title']}: beside the paper", heads, rows)


def cell(row: Row) -> str:
    """Median and range."""
    values = (row.min, row.median, row.max)
    low, middle, high = (number_text(value, digits(row.quantity)) for value in values)
    return f"{middle} ({low}-{high})"


def digits(quantity: Figure) -> int:
    """That are shown."""
    return 4 if quantity == AMPLIFICATION else 3


def number_text(value: float, digits: int = 3) -> str:
    """So many digits, and all of a large number."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"


def place_text(x: float, axis: str) -> str:
    """A place on the axis."""
    return f"{x / 1e6:.0f} MB" if axis == _BYTES_AXIS else f"{x:g}"


def _markdown(grid: Grid) -> str:
    rows = [grid.heads, ["---"] * len(grid.heads), *grid.rows]
    return f"{grid.title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)
