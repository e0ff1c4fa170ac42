"""A run of the suite `deepspeed` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckpt_core.bench.results import Figure, Report
from ckpt_core.bench.tables import (
    contenders_table,
    interval_tables,
    machine_text,
    ratio_table,
    unit_name,
)
from ckpt_deepspeed_tools.bench import figures
from ckpt_deepspeed_tools.bench.crew import CANNOT_LOAD, CANNOT_RUN
from ckpt_deepspeed_tools.bench.settings import RANKS

Column = tuple[str, Callable[[int], Figure]]

BLOCKED: tuple[Column, ...] = (
    ("save_checkpoint", figures.call),
    ("extra of the next steps", figures.extra),
    ("both", figures.stall),
)
TOTAL: tuple[Column, ...] = (
    ("until `latest`", figures.latest),
    ("until durable", figures.durable),
    ("fsync that is left out", figures.fsync),
)
MEMORY: tuple[Column, ...] = (("rank that takes most", figures.memory),)
WRITTEN: tuple[Column, ...] = (
    ("both ranks", figures.amplification),
    *[(f"rank {rank}", partial(figures.written, rank=rank)) for rank in range(RANKS)],
)
_STEADY = (
    ("Stall of one save", BLOCKED),
    ("From the call", TOTAL),
    ("Peak extra memory", MEMORY),
    ("Bytes written for one save / bytes of the tensors in it", WRITTEN),
)


def render(report: Report) -> RenderableType:
    """Everything a run found; ratios are to the median of ours in the same column."""
    parts: list[RenderableType] = [machine_text(report)]
    for stage in report.settings["stages"]:
        parts += _of_stage(report, stage)
    if report.more[CANNOT_RUN] or report.more[CANNOT_LOAD]:
        parts.append(_problems(report))
    parts.append(contenders_table(report))
    return Group(*parts)


def _of_stage(report: Report, stage: int) -> Iterator[Table]:
    for title, columns in _STEADY:
        made = [(heading, make(stage)) for heading, make in columns]
        if any(report.stats(figure) for _, figure in made):
            yield ratio_table(report, f"ZeRO {stage}: {title}, {unit_name(made[0][1])}", made)
    rows = (
        (f"ZeRO {stage}: Step over the same without saves", partial(figures.slowdown, stage)),
        (f"ZeRO {stage}: Step", partial(figures.step, stage)),
    )
    yield from interval_tables(report, rows)


def _problems(report: Report) -> Table:
    """What peers cannot do here, in their own words."""
    table = Table(title="Cannot run or load here")
    for column in ("way", "ZeRO", "cannot", "its own error"):
        table.add_column(column)
    for section, what in ((CANNOT_RUN, "run"), (CANNOT_LOAD, "load")):
        for name, errors in report.more[section].items():
            for stage, error in errors.items():
                table.add_row(name, stage, what, Text(error))
    return table
