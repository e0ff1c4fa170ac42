"""A run of the suite `horovod` as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckpt_core.bench import results
from ckpt_core.bench.results import Make, Report
from ckpt_core.bench.tables import contenders_table, interval_tables, machine_text, ratio_table
from ckpt_horovod_tools.bench import figures
from ckpt_horovod_tools.bench.settings import RANKS
from ckpt_horovod_tools.bench.ways import BASE, BASES, NO_SPIN, OURS

BY_INTERVAL: tuple[tuple[str, Make], ...] = (
    ("Iteration", figures.iteration),
    (f"Overhead over {BASE}", figures.overhead_over(BASE)),
    (f"Overhead over {NO_SPIN}", figures.overhead_over(NO_SPIN)),
    ("Stall of a save on the slower rank", results.train_stall),
)


def render(report: Report) -> RenderableType:
    """Everything a run found; ratios are to the median of ours in the same column."""
    parts: list[RenderableType] = [machine_text(report)]
    parts += interval_tables(report, BY_INTERVAL)
    columns = [(f"rank {rank}", figures.written(rank)) for rank in range(RANKS)]
    if any(report.stats(figure) for _, figure in columns):
        parts.append(ratio_table(report, "Bytes written for a save / state bytes, x", columns))
    parts += [_frequencies(report.more["frequency"], base) for base in BASES]
    parts.append(contenders_table(report))
    return Group(*parts)


def _frequencies(found: dict[str, Any], base: str) -> Table:
    """LightCheck's Table I: how often each way can save."""
    title = f"Shortest interval with less than {found['bound']:.0%} overhead over {base}"
    table = Table(title=title)
    table.add_column("way")
    for column in ("measured", "predicted", "cost of a save, ms"):
        table.add_column(column, justify="right")
    for name, rows in found["ways"].items():
        for row in rows:
            if row["base"] == base:
                table.add_row(name, *_cells(row), style="bold" if name == OURS else None)
    return table


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    measured = f"> {row['longest']}" if row["measured"] is None else str(row["measured"])
    return measured, str(row["predicted"]), f"{row['save_s'] * 1e3:.1f}"
