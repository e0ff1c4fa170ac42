"""Every rank gets the values of all: rank 0 collects them and writes them down as one.

Keys: value/<r> by rank r, or by rank 0 for a rank that is lost; all by rank 0, or by whoever holds rank 0 for
dead, has waited in vain or leaves; acks by everybody, of whom the last deletes the keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ckpt_core.coordination.agreement import Json
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.crew import Crew
from ckpt_core.errors import CommitError, CoordinationTimeout
from ckpt_core.system.threads import own_lock

_LATE = "it has not called gather in time"


class Gathering:
    """One call of `gather`, as one rank takes part in it.

    Args:
        crew: the ranks.
        topic: what for; of one with a slash, what follows is the call that it is in (see `call_id`), and not
            for people.
        number: how many came before in this call, or for this topic, on every rank.

    Attributes:
        answered: this rank knows what all have.
    """

    def __init__(self, crew: Crew, topic: str, number: int) -> None:
        self._crew = crew
        self._topic = topic.partition("/")[0]
        self.number = number
        self.answered = self._acknowledged = False
        base = f"{crew.prefix}/gather/{number}/{call_of(topic)}"
        self._values = [f"{base}/value/{rank}" for rank in range(crew.info.world_size)]
        self._all = f"{base}/all"
        self._acks = f"{base}/acks"

    def run(self, channel: Channel, value: Json) -> tuple[Json, ...]:
        """See Coordination.gather; StoreGone as it comes."""
        own = {self._values[self._crew.info.rank]: json.dumps({"value": value})}
        leads = self._crew.info.rank == 0
        text = self._collect(channel, own) if leads else self._await_all(channel, own)
        # Order matters: known before it is acknowledged, and all keys may go.
        self.answered = True
        self._acknowledge(channel)
        answer: Any = json.loads(text)
        if answer["lost"]:
            raise self._error({int(rank): why for rank, why in answer["lost"].items()})
        return tuple(answer["values"])

    def leave(self, channel: Channel, mine: Json, others: Json) -> bool:
        """This rank takes part no more: all get `mine` from it and `others` from the rest, for which nobody
        waits. False: they have the values of all already.
        """
        rank, count = self._crew.info.rank, self._crew.info.world_size
        values = [mine if one == rank else others for one in range(count)]
        ended = json.dumps({"lost": {}, "values": values, "left": True})
        answer: Any = json.loads(channel.put_first(self._all, ended))
        # Rank 0 waits for it, before it looks at what stands.
        channel.put_first(self._values[rank], json.dumps({"value": mine}))
        self._acknowledge(channel)
        return bool(answer["lost"] or "left" in answer)

    def _acknowledge(self, channel: Channel) -> None:
        if self._acknowledged:
            return
        # Order matters: once too often would take the keys from a rank that has not read them.
        self._acknowledged = True
        if channel.count(self._acks) >= self._crew.info.world_size:
            channel.delete([*self._values, self._all, self._acks])

    def reap(self, channel: Channel) -> None:
        """Rank 0, long after: delete what a rank that died has left."""
        if self.is_pending(channel):
            channel.delete([*self._values, self._all, self._acks])

    def is_pending(self, channel: Channel) -> bool:
        """Whether some rank has not read it yet."""
        return channel.has([self._acks])

    def _await_all(self, channel: Channel, own: dict[str, str]) -> str:
        """Any other rank: what rank 0 has written down."""
        texts = channel.await_values(
            [self._all], lambda: self._watch_rank_0(channel), put_first=own
        )
        if texts is None:
            # Not without a word: the others would go on with what this rank has not got.
            return self._end(channel, self._late(channel))
        if not texts:
            rank = self._crew.info.rank
            raise CommitError(f"gather of {self._topic!r} had ended before, without rank {rank}")
        return texts[0]

    def _late(self, channel: Channel) -> dict[int, str]:
        """Any other rank, at its deadline: whom rank 0 still waits for or has given up, or rank 0 itself."""
        missing = set(channel.missing(self._values))
        late = {rank: _LATE for rank, key in enumerate(self._values) if key in missing}
        if not late:
            late = _lost(channel.read_all(self._values) or [])
        return late or {0: "it has not answered in time"}

    def _collect(self, channel: Channel, own: dict[str, str]) -> str:
        """Rank 0: write down the values of all; what stands."""
        early = channel.early()
        texts = early.await_values(self._values, lambda: self._watch(channel), put_first=own)
        if texts is None:
            for rank, key in enumerate(self._values):
                self._give_up(channel, rank, key, _LATE)
            texts = channel.read_all(self._values)
        if not texts:
            raise CommitError(f"gather of {self._topic!r} had ended before, without rank 0")
        lost = _lost(texts)
        values = [] if lost else [json.loads(text)["value"] for text in texts]
        return channel.put_first(self._all, json.dumps({"lost": lost, "values": values}))

    def _watch(self, channel: Channel) -> None:
        others = range(1, self._crew.info.world_size)
        lost = self._crew.liveness.look(channel, others) if others else {}
        if channel.has([self._all]):
            # Another rank has ended it, and those who have not come would wait for nothing either.
            lost = dict.fromkeys(others, _LATE)
        for rank, why in lost.items():
            self._give_up(channel, rank, self._values[rank], why)

    def _give_up(self, channel: Channel, rank: int, key: str, why: str) -> None:
        channel.put_first(key, json.dumps({"lost": why}))

    def _watch_rank_0(self, channel: Channel) -> None:
        lost = self._crew.liveness.look(channel, [0])
        if lost:
            self._end(channel, lost)

    def _end(self, channel: Channel, lost: dict[int, str]) -> str:
        """Any other rank: let nobody have the values, unless all may have them already; what stands."""
        return channel.put_first(self._all, json.dumps({"lost": lost, "values": []}))

    def _error(self, lost: dict[int, str]) -> CoordinationTimeout:
        ranks = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(lost.items())[:8])
        return CoordinationTimeout(
            f"the ranks could not exchange {self._topic!r}: {ranks}. Nothing was changed. Look for a rank "
            "that died or hangs; raise `timeout` if all are merely slow",
            rank=min(lost),
        )


class Gatherings:
    """Every gather that this rank has begun, by call or topic."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._lock = own_lock()
        self._calls = 0
        self._last: dict[str, Gathering] = {}

    def call_id(self) -> str:
        """See Coordination."""
        # Not counted here: an interrupt may come before the caller has it.
        return str(self._calls + 1)

    def begin(self, topic: str) -> Gathering:
        """The next one."""
        with self._lock:
            # One assignment: interrupted before it, none was begun.
            self._last[call_of(topic)] = gathering = self._next(topic)
            self.begun(call_of(topic))
        return gathering

    def begun(self, call: str) -> None:
        """Count a call, once; the next one has another id."""
        self._calls = max(self._calls, int(call) if call.isdecimal() else 0)

    def leave(self, channel: Channel, call: str, mine: Json, others: Json) -> Iterator[Gathering]:
        """End the one that is under way in a call, or else the next one; those that were asked."""
        last = self._last.get(call)
        if last is not None and not last.answered:
            yield last
            if last.leave(channel, mine, others):
                return
        following = self._next(call)
        yield following
        following.leave(channel, mine, others)

    def _next(self, topic: str) -> Gathering:
        last = self._last.get(call_of(topic))
        return Gathering(self._crew, topic, 0 if last is None else last.number + 1)


def call_of(topic: str) -> str:
    """What gathers are counted by."""
    return topic.partition("/")[2] or topic


def _lost(texts: list[str]) -> dict[int, str]:
    """Which ranks have been given up, and why, by the values of all."""
    rows = [json.loads(text) for text in texts]
    return {rank: row["lost"] for rank, row in enumerate(rows) if "lost" in row}
