"""Commits of more ranks than this machine could run: simulated, with costs measured here, and compared.

a real TCPStore is asked         -> what a message costs the store
real commits of one rank         -> what a message costs a rank
real commits of 2 .. 64 ranks    -> what the simulation must predict
simulated commits                -> what 10,000 ranks would take
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ckpt_core.bench.plot import finish, log_ticks
from ckpt_core.bench.ranks.commit_messages import simulate
from ckpt_core.bench.ranks.real_commits import measure
from ckpt_core.bench.ranks.simulation import Costs
from ckpt_core.bench.results import Report
from ckpt_core.bench.tables import Column, rows_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ckpt_core.bench.ranks.settings import RankSettings

SPREAD_S = 1.0
"""The other case than all votes at once: ranks are through with their files within so many seconds."""

_ROUND_TRIPS = 2


def run(settings: RankSettings, notify: Callable[[str], None]) -> dict[str, Any]:
    """The section "messages" of a report.

    Raises:
        CkptError: the real commits failed.
    """
    notify("messages: real commits")
    real = measure(settings.commits, (1, *settings.real_ranks))
    alone, *others = real["commits"]
    costs = fitted(real["store"], alone)
    simulated: list[dict[str, Any]] = []
    for latency_s in settings.latencies_s:
        # Ranks of a real job have a processor each, and a network between them and the store.
        far = replace(costs, latency_s=latency_s, shared=False)
        for ranks in settings.simulated_ranks:
            notify(f"messages: simulating {ranks} ranks")
            cases = [simulate(ranks, far, spread_s=spread_s) for spread_s in (0.0, SPREAD_S)]
            simulated += [asdict(case) for case in cases]
    return {
        "store": real["store"],
        "costs": asdict(costs),
        "compared": [compared(row, costs) for row in others],
        "simulated": simulated,
    }


def fitted(store: dict[str, Any], alone: dict[str, Any]) -> Costs:
    """Costs of a rank's messages, from commits of one rank: nobody is in its way."""
    messages = simulate(1, Costs(0, 0, 0, 0), beat_s=None).messages
    each_s = median(alone["seconds"]) / messages
    client_s = min(alone["cpu_s"] / messages, each_s)
    latency_s = max(each_s - client_s - store["message_s"], 0.0) / _ROUND_TRIPS
    return Costs(store["message_s"], store["key_s"], latency_s, client_s, shared=True)


def compared(real: dict[str, Any], costs: Costs) -> dict[str, Any]:
    """Real commits of a number of ranks beside the simulation of the same."""
    messages = simulate(real["ranks"], costs, beat_s=None).messages
    # The more threads share an interpreter, the more a message costs them: that is not the store's doing.
    costs = replace(costs, client_s=real["cpu_s"] / messages)
    predicted = simulate(real["ranks"], costs, beat_s=None)
    measured_s = median(real["seconds"])
    return {
        "ranks": real["ranks"],
        "measured_s": measured_s,
        "fastest_s": min(real["seconds"]),
        "slowest_s": max(real["seconds"]),
        "simulated_s": predicted.settled_s,
        "messages": messages,
        "client_s": costs.client_s,
        "ratio": predicted.settled_s / measured_s,
    }


_SIMULATED = (
    Column("ranks", "ranks", "{:,}"),
    Column("latency, us", "latency_s", "{:,.0f}", 1e6),
    Column("votes within, s", "spread_s", "{:g}"),
    Column("last vote to verdict on all, ms", "verdict_s", "{:,.1f}", 1e3),
    Column("messages", "messages", "{:,}"),
    Column("by rank", "by_rank", "{:.1f}"),
    Column("store busy while ranks wait", "waiting_load", "{:.1%}"),
)


def tables(report: Report) -> Iterator[Table]:
    """Real commits beside simulated ones, and simulated ones of many ranks."""
    found = report.more.get("messages")
    if found is None:
        return
    yield _compared(found["store"], found["compared"])
    rows = [{**row, "by_rank": row["messages"] / row["ranks"]} for row in found["simulated"]]
    yield rows_table("Simulated commits, without the time to publish", _SIMULATED, rows)


def _compared(store: dict[str, Any], found: list[dict[str, Any]]) -> Table:
    columns = (
        Column("ranks", "ranks"),
        Column("real, ms", "real"),
        Column("simulated, ms", "simulated_s", "{:.1f}", 1e3),
        Column("simulated / real", "ratio", "{:.2f}x"),
        Column("messages", "messages"),
    )
    seconds = [(row["measured_s"], row["fastest_s"], row["slowest_s"]) for row in found]
    texts = ["{:.1f} ({:.1f}-{:.1f})".format(*(one * 1e3 for one in three)) for three in seconds]
    title = (
        f"Commits of threads of one process: TCPStore answered {store['messages_per_s']:,.0f} messages/s "
        f"of {store['clients']} clients, each {store['message_s'] * 1e6:.1f} us of its processor"
    )
    rows = [{**row, "real": text} for row, text in zip(found, texts, strict=True)]
    return rows_table(title, columns, rows)


def areas(report: Report) -> Iterator[Callable[[Axes], None]]:
    """A line for each case of the simulation, over the number of ranks."""
    if report.more.get("messages"):
        yield partial(_draw, rows=report.more["messages"]["simulated"])


def _draw(area: Axes, *, rows: list[dict[str, Any]]) -> None:
    for number, case in enumerate(sorted({(row["latency_s"], row["spread_s"]) for row in rows})):
        points = [
            (row["ranks"], row["verdict_s"] * 1e3)
            for row in rows
            if (row["latency_s"], row["spread_s"]) == case
        ]
        label = f"latency {case[0] * 1e6:g} µs, votes within {case[1]:g} s"
        area.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=label)
    area.set_xscale("log")
    area.set_yscale("log")
    area.set_xlabel("simulated ranks", fontsize=9)
    area.set_ylabel("ms", fontsize=9)
    area.legend(fontsize=8, frameon=False)
    log_ticks(area.xaxis)
    log_ticks(area.yaxis)
    finish(area, "Simulated commit: last vote to verdict on all ranks")
