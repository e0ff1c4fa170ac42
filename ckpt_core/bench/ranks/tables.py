"""A run of the suite `ranks` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckpt_core.bench.ranks import figures
from ckpt_core.bench.results import Make, Report
from ckpt_core.bench.tables import contenders_table, machine_text, ratio_table

_STEADY: tuple[tuple[str, Make], ...] = (
    ("Largest share of a rank / replicated bytes, x", figures.share),
    ("Bytes written by the busiest rank, seen from outside, MB", figures.written),
    ("Save to complete on all ranks, ms", figures.durable),
    ("Last bytes durable to committed everywhere, ms", figures.commit),
    ("Blocking time: save, then wait until staged, slowest rank, ms", figures.blocked),
)


def render(report: Report) -> RenderableType:
    """Everything a run found; ratios are to the median of ours at the same number of ranks."""
    parts: list[RenderableType] = [machine_text(report)]
    parts += [_by_ranks(report, title, make) for title, make in _steady(report)]
    for every in report.settings["intervals"]:
        title = f"Training step with a save every {every} steps, over none, x"
        parts += _known(report, title, figures.slowdown_every(every))
        title = f"Stall of a save in training, every {every} steps, slowest rank, ms"
        parts += _known(report, title, figures.stall_every(every))
    if report.more.get("rank_bytes"):
        parts.append(_rank_bytes(report))
    if "planning" in report.more:
        parts.append(_planning(report.more["planning"]))
    if "messages" in report.more:
        parts += _messages(report.more["messages"])
    if report.entrants:
        parts.append(contenders_table(report))
    return Group(*parts)


def _steady(report: Report) -> Iterator[tuple[str, Make]]:
    for title, make in _STEADY:
        if any(report.stats(make(ranks)) for ranks in report.settings["world_sizes"]):
            yield title, make


def _known(report: Report, title: str, make: Make) -> Iterator[Table]:
    if any(report.stats(make(ranks)) for ranks in report.settings["world_sizes"]):
        yield _by_ranks(report, title, make)


def _by_ranks(report: Report, title: str, make: Make) -> Table:
    numbers = report.settings["world_sizes"]
    columns = [(f"{ranks} ranks" if ranks > 1 else "1 rank", make(ranks)) for ranks in numbers]
    return ratio_table(report, title, columns)


def _rank_bytes(report: Report) -> Table:
    rows = []
    for ranks, ways in report.more["rank_bytes"].items():
        for name in report.entrants:
            sizes = "  ".join(f"{size / 1e6:.2f}" for size in ways.get(name, []))
            rows.append((ranks, name, sizes))
    return _table("Files of the newest step by rank, MB", ("ranks", "way", "rank 0, 1, ..."), rows)


def _planning(found: Sequence[dict[str, Any]]) -> Table:
    columns = (
        "structure",
        "leaves",
        "ranks",
        "one rank, ms",
        "slowest, ms",
        "plans made",
        "all of them, s",
        "peak memory, MB",
        "largest / even share",
    )
    rows = [
        (
            row["structure"],
            f"{row['leaves']:,}",
            f"{row['ranks']:,}",
            f"{row['rank_s'] * 1e3:.1f}",
            f"{row['slowest_s'] * 1e3:.1f}",
            f"{row['made']:,}",
            f"{row['all_s']:.2f}",
            f"{row['peak_bytes'] / 1e6:.2f}",
            f"{row['largest_share']:.4f}",
        )
        for row in found
    ]
    return _table("Planning: share_leaves and structure_hash of one rank", columns, rows)


def _messages(found: dict[str, Any]) -> Iterator[Table]:
    yield _compared(found["store"], found["compared"])
    rows = [
        (
            f"{row['ranks']:,}",
            f"{row['latency_s'] * 1e6:,.0f}",
            f"{row['spread_s']:g}",
            f"{row['verdict_s'] * 1e3:,.1f}",
            f"{row['messages']:,}",
            f"{row['messages'] / row['ranks']:.1f}",
            f"{row['waiting_load']:.1%}",
        )
        for row in found["simulated"]
    ]
    columns = (
        "ranks",
        "latency, us",
        "votes within, s",
        "last vote to verdict on all, ms",
        "messages",
        "by rank",
        "store busy while ranks wait",
    )
    yield _table("Simulated commits, without the time to publish", columns, rows)


def _compared(store: dict[str, Any], found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            str(row["ranks"]),
            f"{row['measured_s'] * 1e3:.1f} "
            f"({row['fastest_s'] * 1e3:.1f}-{row['slowest_s'] * 1e3:.1f})",
            f"{row['simulated_s'] * 1e3:.1f}",
            f"{row['ratio']:.2f}x",
            str(row["messages"]),
        )
        for row in found
    ]
    columns = ("ranks", "real, ms", "simulated, ms", "simulated / real", "messages")
    title = (
        f"Commits of threads of one process: TCPStore answered {store['messages_per_s']:,.0f} messages/s "
        f"of {store['clients']} clients, each {store['message_s'] * 1e6:.1f} us of its processor"
    )
    return _table(title, columns, rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
