"""What a picture of the suite `ranks` shows: lines over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.plot import finish_lines, lines
from ckpt_core.bench.ranks import figures
from ckpt_core.bench.results import Make, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """Which areas there is something to draw for."""
    makes: list[tuple[str, Make]] = [
        ("Largest share of a rank / replicated bytes", figures.share),
        ("Save to complete on all ranks", figures.durable),
        ("Blocking time: save, then wait until staged", figures.blocked),
    ]
    for every in report.settings["intervals"]:
        title = f"Training step with a save every {every} steps, over none"
        makes.append((title, figures.slowdown_every(every)))
    numbers = report.settings["world_sizes"]
    found: list[Callable[[Axes], None]] = [
        partial(_by_ranks, report=report, title=title, make=make)
        for title, make in makes
        if any(report.stats(make(ranks)) for ranks in numbers)
    ]
    if report.more.get("messages"):
        found.append(partial(_messages, rows=report.more["messages"]["simulated"]))
    return found


def _by_ranks(area: Axes, *, report: Report, title: str, make: Make) -> None:
    lines(area, report=report, make=make, numbers=report.settings["world_sizes"], base=2)
    area.set_xlabel("ranks", fontsize=9)
    finish_lines(area, title)


def _messages(area: Axes, *, rows: list[dict[str, Any]]) -> None:
    for number, case in enumerate(sorted({(row["latency_s"], row["spread_s"]) for row in rows})):
        points = [
            (row["ranks"], row["verdict_s"] * 1e3)
            for row in rows
            if (row["latency_s"], row["spread_s"]) == case
        ]
        label = f"latency {case[0] * 1e6:g} us, votes within {case[1]:g} s"
        area.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=label)
    area.set_xscale("log")
    area.set_yscale("log")
    area.set_xlabel("simulated ranks", fontsize=9)
    area.set_ylabel("ms", fontsize=9)
    area.legend(fontsize=8)
    finish_lines(area, "Simulated commit: last vote to verdict on all ranks")
