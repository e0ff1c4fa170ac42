"""What the ranks of a shared root send to the store for one commit: docs/protocol.md as generators.

Every rank votes yes. `get` is two messages, since TCPStore's client waits for the key before it asks for it.
Publishing itself, between the decision and the verdict, takes no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from ckpt_core.bench.ranks.simulation import Answer, Client, Costs, Request, Simulation, Verb

BEAT_S = 5.0
"""How often a rank says that it lives, and looks whether those it waits for do, by default."""

WATCH_MESSAGES = 3
"""Messages of one such look: check, then get."""

_Messages = Generator[Request, Answer, None]


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated commit.

    Attributes:
        ranks: how many.
        latency_s: one way through the network.
        spread_s: time between the first vote and the last.
        verdict_s: from the last vote until every rank has read the verdict.
        settled_s: until every rank has cleaned up behind it and goes on.
        messages: that the store served for it, heartbeats included.
        store_busy_s: how long the store was busy with them.
        waiting_load: part of its time that the store is busy while all ranks wait for one that is late.
    """

    ranks: int
    latency_s: float
    spread_s: float
    verdict_s: float
    settled_s: float
    messages: int
    store_busy_s: float
    waiting_load: float


def simulate(
    ranks: int, costs: Costs, *, spread_s: float = 0.0, beat_s: float | None = BEAT_S
) -> Simulated:
    """One commit of that many ranks, their votes spread evenly over `spread_s`; no heartbeats with None."""
    simulation = Simulation(costs)
    read: list[float] = []
    for rank in range(ranks):
        client = commit(rank, ranks, lambda: read.append(simulation.now))
        simulation.add(client, at=spread_s * rank / ranks)
        if beat_s is not None:
            beat = Request(Verb.SET, (f"beat/{rank}",))
            simulation.repeat(beat, first=beat_s * rank / ranks, every=beat_s)
    simulation.run()
    last_vote_s = spread_s * (ranks - 1) / ranks
    # Each rank beats and looks after rank 0, which looks after all.
    messages = ranks * (1 + WATCH_MESSAGES)
    keys = WATCH_MESSAGES * (ranks - 1)
    return Simulated(
        ranks,
        costs.latency_s,
        spread_s,
        verdict_s=max(read) - last_vote_s,
        settled_s=max(simulation.ended_s.values()) - last_vote_s,
        messages=simulation.messages,
        store_busy_s=simulation.busy_s,
        waiting_load=(messages * costs.message_s + keys * costs.key_s) / (beat_s or BEAT_S),
    )


def commit(rank: int, ranks: int, on_verdict: Callable[[], None]) -> Client:
    """One rank's messages for one commit, from its vote to the end of its part."""
    vote = _vote(rank)
    yield Request(Verb.SET, (vote,))
    count = yield Request(Verb.ADD, ("count",))
    if count >= ranks:
        yield from _set_first("gate")
    if rank == 0:
        yield from _decide(tuple([_vote(number) for number in range(ranks)]))
    else:
        yield Request(Verb.WAIT, ("verdict",))
        yield from _read(("verdict",))
    on_verdict()
    yield from _finish(vote, ranks)


def _vote(rank: int) -> str:
    return f"vote/{rank}"


def _decide(votes: tuple[str, ...]) -> _Messages:
    yield Request(Verb.WAIT, ("gate",))
    yield from _read(("gate",))
    yield Request(Verb.WAIT, votes)
    yield from _read(votes)
    yield from _set_first("decision")
    yield from _read(votes)  # what the ranks of this root have to say to its leader
    yield from _set_first("report/0")
    yield Request(Verb.WAIT, ("report/0",))
    yield from _read(("report/0",))
    yield from _set_first("verdict")


def _set_first(key: str) -> _Messages:
    """Of whoever comes first: see `Channel.put_first`."""
    yield Request(Verb.SET_FIRST, (key,))
    yield Request(Verb.SET, (key,))


def _read(keys: tuple[str, ...]) -> _Messages:
    yield Request(Verb.CHECK, keys)
    yield Request(Verb.WAIT, keys)
    yield Request(Verb.GET, keys)


def _finish(vote: str, ranks: int) -> _Messages:
    yield Request(Verb.DELETE, (vote,))
    acks = yield Request(Verb.ADD, ("acks",))
    if acks >= ranks:
        for key in ("count", "gate", "decision", "finding", "verdict", "report/0", "acks"):
            yield Request(Verb.DELETE, (key,))
