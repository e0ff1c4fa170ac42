"""Commits of more ranks than this machine could run: simulated, with costs measured here, and compared.

a real TCPStore is asked         -> what a message costs the store
real commits of one rank         -> what a message costs a rank
real commits of 2 .. 64 ranks    -> what the simulation must predict
simulated commits                -> what 10,000 ranks would take
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from ckpt_core.bench.ranks.commit_messages import simulate
from ckpt_core.bench.ranks.real_commits import measure
from ckpt_core.bench.ranks.settings import RankSettings
from ckpt_core.bench.ranks.simulation import Costs

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
