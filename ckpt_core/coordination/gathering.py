"""Every rank gets the values of all: rank 0 collects them and writes them down as one.

Keys: value/<r> by rank r, or by rank 0 for a rank that is lost; all by rank 0, or by whoever holds rank 0 for
dead or has waited in vain; acks by everybody, of whom the last deletes the keys.
"""

from __future__ import annotations

import json
from typing import Any

from ckpt_core.coordination.agreement import Json
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.crew import Crew
from ckpt_core.errors import CommitError, CoordinationTimeout

_LATE = "it has not called gather in time"


class Gathering:
    """One call of `gather`, as one rank takes part in it.

    Args:
        crew: the ranks.
        topic: what for; what follows a slash tells calls apart, and is not for people.
        number: how many calls for this topic came before, on every rank.
    """

    def __init__(self, crew: Crew, topic: str, number: int) -> None:
        self._crew = crew
        self._topic = topic.partition("/")[0]
        base = f"{crew.prefix}/gather/{number}/{topic}"
        self._values = [f"{base}/value/{rank}" for rank in range(crew.info.world_size)]
        self._all = f"{base}/all"
        self._acks = f"{base}/acks"

    def run(self, channel: Channel, value: Json) -> tuple[Json, ...]:
        """See Coordination.gather; StoreGone as it comes."""
        own = {self._values[self._crew.info.rank]: json.dumps({"value": value})}
        leads = self._crew.info.rank == 0
        text = self._collect(channel, own) if leads else self._await_all(channel, own)
        if channel.count(self._acks) >= self._crew.info.world_size:
            channel.delete([*self._values, self._all, self._acks])
        answer: Any = json.loads(text)
        if answer["lost"]:
            raise self._error({int(rank): why for rank, why in answer["lost"].items()})
        return tuple(answer["values"])

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


def _lost(texts: list[str]) -> dict[int, str]:
    """Which ranks have been given up, and why, by the values of all."""
    rows = [json.loads(text) for text in texts]
    return {rank: row["lost"] for rank, row in enumerate(rows) if "lost" in row}
