"""Tables for a terminal, as all suites have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Figure, Report, Unit

_SCALES = {
    Unit.BYTES_PER_S: (1e-9, "GB/s", 2),
    Unit.SECONDS: (1e3, "ms", 2),
    Unit.MICROSECONDS: (1.0, "us", 1),
    Unit.BYTES: (1e-6, "MB", 1),
    Unit.TIMES: (1.0, "x", 3),
    Unit.STEPS: (1.0, "steps", 0),
    Unit.PER_S: (1.0, "1/s", 2),
    Unit.SECONDS_PER_GB: (1.0, "s/GB", 2),
    Unit.PERCENT: (100.0, "%", 1),
}


_SENTENCE = 80
"""Characters of a cell that holds whole sentences, however wide its line may be."""


def scaled(figure: Figure, value: float) -> float:
    """A value in the unit that people read."""
    return value * _SCALES[figure.unit][0]


def unit_name(figure: Figure) -> str:
    """That unit."""
    return _SCALES[figure.unit][1]


def state_line(report: Report) -> str:
    """What is saved, and how often."""
    return (
        f"state {report.settings['state_bytes'] / 1e6:.0f} MB in {report.settings['leaves']} leaves, "
        f"{report.settings['rounds']} rounds in random order; ratio = median / median of {report.title(OURS)}"
    )


def machine_line(report: Report) -> str:
    """Where it ran."""
    machine = report.machine
    return (
        f"{machine.date}  {machine.cpu}, {machine.cpus} CPUs, {machine.memory_bytes / 1e9:.0f} GB; "
        f"{machine.filesystem} on {machine.disk}; Linux {machine.kernel}; torch {machine.torch}"
    )


def _number(figure: Figure, value: float) -> str:
    return f"{scaled(figure, value):.{_SCALES[figure.unit][2]}f}"


def steady_table(report: Report, figure: Figure) -> Table:
    """A row for each contender: lowest, middle and highest value, ratio, and whether it fsyncs."""
    better = "higher" if figure.higher_is_better else "lower"
    title = f"{figure.title} ({unit_name(figure)}, {better} is better)"
    table = _of_ways(title, first="contender")
    for column in ("min", "median", "max", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("fsync")
    for name, stats in report.stats(figure).items():
        ratio = report.ratio(figure, name)
        numbers = [_number(figure, value) for value in (stats.min, stats.median, stats.max)]
        text = "" if ratio is None else f"{ratio:.2f}x"
        _add(report, table, name, [*numbers, text, report.entrants[name].fsyncs])
    return table


def spread_table(report: Report, figure: Figure) -> Table:
    """A row for each way: median with range, and ratio."""
    better = "higher" if figure.higher_is_better else "lower"
    table = _of_ways(f"{figure.title} ({unit_name(figure)}, {better} is better)")
    for heading in ("median (min-max)", "ratio"):
        table.add_column(heading, justify="right")
    for name in report.stats(figure):
        ratio = report.ratio(figure, name)
        text = "" if ratio is None else f"{ratio:.2f}x"
        _add(report, table, name, [cell(report, figure, name), text])
    return table


def cell_table(report: Report, title: str, columns: Sequence[tuple[str, Figure]]) -> Table:
    """A row for each contender that has a value, a column for each named figure, without ratios."""
    table = _of_ways(f"{title}, median (min-max)", first="contender")
    return _filled(report, table, columns, cell)


def cell(report: Report, figure: Figure, name: str) -> str:
    """Median and range of a contender; empty if it has none."""
    stats = report.stats(figure).get(name)
    if stats is None:
        return ""
    low, middle, high = (_number(figure, value) for value in (stats.min, stats.median, stats.max))
    return f"{middle} ({low}{' to ' if stats.min < 0 else '-'}{high})"


def with_ratio(report: Report, figure: Figure, name: str) -> str:
    """Median, range and ratio of a contender; empty if it has none."""
    text, ratio = cell(report, figure, name), report.ratio(figure, name)
    return text if ratio is None or not text else f"{text} {ratio:.2f}x"


def ratio_table(report: Report, title: str, columns: Sequence[tuple[str, Figure]]) -> Table:
    """A row for each way that has a value, a column for each named figure; `title` has the unit."""
    ratios = any(figure.unit is not Unit.PERCENT for _, figure in columns)
    known = f"median (min-max) and ratio to {report.title(OURS)}" if ratios else "median (min-max)"
    return _filled(report, _of_ways(f"{title}: {known}"), columns, with_ratio)


def _of_ways(title: str, first: str = "way") -> Table:
    table = Table(title=title)
    table.add_column(first)
    return table


def _filled(
    report: Report,
    table: Table,
    columns: Sequence[tuple[str, Figure]],
    text: Callable[[Report, Figure, str], str],
) -> Table:
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for name in report.entrants:
        cells = [text(report, figure, name) for _, figure in columns]
        if any(cells):
            _add(report, table, name, cells)
    return table


def _add(report: Report, table: Table, name: str, cells: Sequence[str]) -> None:
    table.add_row(report.title(name), *cells, style="bold" if name == OURS else None)


@dataclass(frozen=True, slots=True)
class Column:
    """Of a table of rows of plain values: heading, field of a row, how it is written, in which unit."""

    heading: str
    field: str
    text: str = "{}"
    scale: float = 1

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of one row."""
        value = row[self.field]
        return self.text.format(value if self.scale == 1 else value * self.scale)


def rows_table(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return text_table(title, [column.heading for column in columns], cells)


def text_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
) -> Table:
    """Of texts; columns of words are named in `left`."""
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def contenders_table(report: Report) -> Table:
    """Who ran, with which settings, and who did not."""
    table = Table(title="Contenders")
    for column in ("contender", "in options and JSON", "release", "fsync", "restored equal"):
        table.add_column(column)
    table.add_column("settings, remarks", max_width=_SENTENCE)
    verdicts = {True: "yes", False: "NO", None: ""}
    for name, entrant in report.entrants.items():
        remarks = [entrant.settings, *entrant.notes]
        if entrant.reason is not None:
            remarks.append(f"{'FAILED' if entrant.failed else 'not run'}: {entrant.reason}")
        table.add_row(
            report.title(name),
            name if report.title(name) != name else "",
            entrant.version,
            entrant.fsyncs,
            verdicts[entrant.restored],
            "; ".join(filter(None, remarks)),
        )
    return table
