"""A run of the suite `lightning` as tables for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from ckpt_core.bench import results
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Figure, Make, Report
from ckpt_core.bench.tables import (
    cell,
    contenders_table,
    interval_tables,
    machine_text,
    unit_name,
)
from ckpt_lightning_tools.bench import figures

BY_INTERVAL: tuple[tuple[str, Make], ...] = (
    ("Training step over none", results.slowdown),
    ("Stall of a save", results.train_stall),
    ("End-to-end fit over none", figures.fit_time),
    ("Peak extra memory of a fit", figures.memory),
)
STEADY: tuple[Figure, ...] = (
    results.TRAIN_BASE,
    figures.LARGE_STALL,
    figures.LARGE_LONGEST,
    figures.LARGE_STEP,
    figures.LARGE_FIT,
    figures.LARGE_MEMORY,
)


def render(report: Report) -> RenderableType:
    """Everything a run found; ratios are to the median of ours in the same column."""
    parts: list[RenderableType] = [machine_text(report)]
    parts += interval_tables(report, BY_INTERVAL)
    parts += [_steady(report, figure) for figure in STEADY if report.stats(figure)]
    parts.append(contenders_table(report))
    return Group(*parts)


def _steady(report: Report, figure: Figure) -> Table:
    table = Table(title=f"{figure.title} ({unit_name(figure)}, lower is better)")
    table.add_column("way")
    table.add_column("median (min-max)", justify="right")
    table.add_column("ratio", justify="right")
    for name in report.stats(figure):
        ratio = report.ratio(figure, name)
        table.add_row(
            name,
            cell(report, figure, name),
            "" if ratio is None else f"{ratio:.2f}x",
            style="bold" if name == OURS else None,
        )
    return table
