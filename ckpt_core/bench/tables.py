"""A run as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckpt_core.bench import results
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Figure, Make, Report, Unit

_STEADY = (
    results.PERSIST,
    results.STALL,
    results.STALL_CALL,
    results.STALL_BARRIER,
    results.RESTORE_WARM,
    results.RESTORE_COLD,
    results.LEAVES_STALL,
    results.MEMORY,
    results.AMPLIFICATION,
)
_SCALES = {
    Unit.BYTES_PER_S: (1e-9, "GB/s", 2),
    Unit.SECONDS: (1e3, "ms", 2),
    Unit.BYTES: (1e-6, "MB", 1),
    Unit.TIMES: (1.0, "x", 3),
    Unit.STEPS: (1.0, "steps", 0),
    Unit.PERCENT: (100.0, "%", 1),
}


def render(report: Report) -> RenderableType:
    """Everything a run found: the machine, one table for each figure, and what did not run."""
    parts: list[RenderableType] = [machine_text(report)]
    parts += [_table(report, figure) for figure in _STEADY if report.stats(figure)]
    parts += list(_intervals(report))
    parts.append(contenders_table(report))
    return Group(*parts)


def scaled(figure: Figure, value: float) -> float:
    """A value in the unit that people read."""
    return value * _SCALES[figure.unit][0]


def unit_name(figure: Figure) -> str:
    """That unit."""
    return _SCALES[figure.unit][1]


def machine_text(report: Report) -> Text:
    """Where it ran, and with what."""
    return Text(
        f"{machine_line(report)}\n"
        f"state {report.settings['state_bytes'] / 1e6:.0f} MB in {report.settings['leaves']} leaves, "
        f"{report.settings['rounds']} rounds in random order; ratio = median / median of {OURS}"
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


def _table(report: Report, figure: Figure) -> Table:
    better = "higher" if figure.higher_is_better else "lower"
    table = Table(title=f"{figure.title} ({unit_name(figure)}, {better} is better)")
    table.add_column("contender")
    for column in ("min", "median", "max", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("fsync")
    for name, stats in report.stats(figure).items():
        ratio = report.ratio(figure, name)
        table.add_row(
            name,
            _number(figure, stats.min),
            _number(figure, stats.median),
            _number(figure, stats.max),
            "" if ratio is None else f"{ratio:.2f}x",
            report.entrants[name].fsyncs,
            style="bold" if name == OURS else None,
        )
    return table


def _intervals(report: Report) -> Iterator[Table]:
    intervals: list[int] = list(report.settings["intervals"])
    for make, title in (
        (results.slowdown, "Training step time over no saves, median (min-max)"),
        (results.train_stall, "Stall of a save in training, ms, median (min-max)"),
    ):
        if not any(report.stats(make(every)) for every in intervals):
            continue
        table = Table(title=title)
        table.add_column("contender")
        for every in intervals:
            table.add_column(f"every {every}", justify="right")
        for name in report.entrants:
            cells = [cell(report, make(every), name) for every in intervals]
            if any(cells):
                table.add_row(name, *cells, style="bold" if name == OURS else None)
        yield table


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


def ratio_table(report: Report, title: str, makes: Sequence[tuple[str, Figure]]) -> Table:
    """A row for each way that has a value, a column for each named figure; `title` has the unit."""
    ratios = any(figure.unit is not Unit.PERCENT for _, figure in makes)
    known = f"median (min-max) and ratio to {OURS}" if ratios else "median (min-max)"
    table = Table(title=f"{title}: {known}")
    table.add_column("way")
    for heading, _ in makes:
        table.add_column(heading, justify="right")
    for name in report.entrants:
        cells = [with_ratio(report, figure, name) for _, figure in makes]
        if any(cells):
            table.add_row(name, *cells, style="bold" if name == OURS else None)
    return table


def interval_tables(report: Report, rows: Sequence[tuple[str, Make]]) -> Iterator[Table]:
    """A table for each figure that was measured, with a column for each interval."""
    intervals: list[int] = list(report.settings["intervals"])
    for title, make in rows:
        columns = [(f"every {every}", make(every)) for every in intervals]
        if any(report.stats(figure) for _, figure in columns):
            yield ratio_table(report, f"{title}, {unit_name(make(intervals[0]))}", columns)


def contenders_table(report: Report) -> Table:
    """Who ran, with which settings, and who did not."""
    table = Table(title="Contenders")
    for column in ("contender", "release", "fsync", "restored equal", "settings, remarks"):
        table.add_column(column)
    verdicts = {True: "yes", False: "NO", None: ""}
    for name, entrant in report.entrants.items():
        remarks = [entrant.settings, *entrant.notes]
        if entrant.reason is not None:
            remarks.append(f"{'FAILED' if entrant.failed else 'not run'}: {entrant.reason}")
        table.add_row(
            name,
            entrant.version,
            entrant.fsyncs,
            verdicts[entrant.restored],
            "; ".join(filter(None, remarks)),
        )
    return table
