"""A run of the suite `policy` as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckpt_core.bench.policy import figures
from ckpt_core.bench.policy.reaction import SETTLE_WITHIN
from ckpt_core.bench.results import Report
from ckpt_core.bench.tables import cell, contenders_table, machine_line

_BY_SAVES = f"from {SETTLE_WITHIN} on, by its saves, %"
_COLUMNS = (
    ("overhead, %", figures.OVERHEAD),
    ("Auto says, %", figures.TOLD),
    ("interval, steps", figures.INTERVAL),
    ("a save adds, ms", figures.COST),
    ("iteration without saves, ms", figures.ITERATION),
)


def render(report: Report) -> RenderableType:
    """Everything a run found."""
    found = report.more["policy"]
    parts: list[RenderableType] = [Text(f"{machine_line(report)}\n{_job_line(report)}")]
    if report.values:
        parts.append(_conditions(report, found["conditions"]))
    changes = [row for row in found["conditions"].values() if row["changes"]]
    parts += [_changes(report, row["changes"]) for row in changes]
    if found["decision"] is not None:
        parts.append(_decision(found["decision"]))
    parts.append(contenders_table(report))
    return Group(*parts)


def _job_line(report: Report) -> str:
    settings = report.settings
    load = settings["load"]
    return (
        f"state {settings['state_bytes'] / 1e6:.0f} MB in {settings['leaves']} leaves, training on "
        f"{settings['threads']} thread(s), {settings['rounds']} rounds; the second job: "
        f"{load['cpu_threads']} thread(s) computing, {load['disk_threads']} writing"
    )


def _conditions(report: Report, found: dict[str, Any]) -> Table:
    """CheckFreq's three bars."""
    bound = report.settings["max_overhead"]
    table = Table(title=f"Overhead with a bound of {bound:.1%}: median (min-max)")
    table.add_column("condition")
    table.add_column("bound")
    for heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("saves, in iterations", justify="right")
    overheads = report.stats(figures.OVERHEAD)
    for name, row in found.items():
        if name in overheads:
            holds = "holds" if overheads[name].median <= bound else "BROKEN"
            cells = [cell(report, figure, name) for _, figure in _COLUMNS]
            table.add_row(name, holds, *cells, _saves(row["rounds"]))
    return table


def _saves(rounds: list[dict[str, Any]]) -> str:
    saves = sum(len(row["intervals"]) for row in rounds)
    return f"{saves} in {sum(row['iterations'] for row in rounds)}"


def _changes(report: Report, changes: list[dict[str, Any]]) -> Table:
    """What Auto did when the second job began."""
    bound = report.settings["max_overhead"]
    table = Table(
        title=f"The second job begins: iterations until the following ones are within {bound:.1%}"
    )
    heads = ("round", "iterations", "of", "overhead of all of them, %", _BY_SAVES, "intervals")
    for column in heads:
        table.add_column(column, justify="right")
    for number, change in enumerate(changes, 1):
        count = len(change["overheads"])
        after = f"not in {count}" if change["after"] is None else str(change["after"])
        intervals = " ".join(str(steps) for _, steps in change["intervals"])
        percents = [f"{part * 100:.1f}" for part in (change["overheads"][0], change["settled"])]
        table.add_row(str(number), after, str(count), *percents, intervals)
    return table


def _decision(found: dict[str, Any]) -> Text:
    median_us, mean_us = found["median_s"] * 1e6, found["mean_s"] * 1e6
    return Text(
        f"A decision of Auto: {median_us:.2f} us, median of {found['questions']} (mean {mean_us:.2f} us)"
    )
