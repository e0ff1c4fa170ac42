"""How the ranks of one run find each other in a store that may hold keys of an earlier run.

    rank r:  join/<r> = its nonce -> waits for welcome/<nonce> -> beats, in/<r> = nonce -> waits for open
             -> its connections are open -> read/<r>
    rank 0:  reads all joins, welcomes each nonce with the run's id -> waits for every in/<r> -> open
             -> waits a little for every read/<r>: it may keep the store, and close at once

Nothing that an earlier run left can be taken for an answer: a welcome is under a nonce that is drawn at each
connection, and everything else is under the run's id, which rank 0 draws at each connection.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core.coordination.channel import Channel
from ckpt_core.errors import ConfigError, CoordinationTimeout
from ckpt_core.system.machine import boot_id

_AGAIN_S = 1.0
"""How long rank 0 waits for those it has welcomed before it looks for joins that are newer."""

_READ_S = 5.0
"""How long it waits for one that has arrived to read that all have; only who dies there takes longer."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as every rank of it knows it.

    Attributes:
        prefix: of all of its keys.
        nodes: of each rank; ranks with equal ones share a root.
        hosts: of each rank; ranks with equal ones share memory.
    """

    prefix: str
    nodes: tuple[str | None, ...]
    hosts: tuple[str, ...]

    def beat_key(self, rank: int) -> str:
        """Under which a rank says that it lives."""
        return f"{self.prefix}/beat/{rank}"

    def groups(self) -> dict[str | None, tuple[int, ...]]:
        """The ranks that share a root, by node, ascending by their first one."""
        found: dict[str | None, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}


@dataclass(frozen=True, slots=True)
class Seat:
    """Who wants to meet: see TorchStore."""

    rank: int
    world_size: int
    node: str | None
    dead_after_s: float


def meet(channel: Channel, base: str, seat: Seat, await_ready: Callable[[], None]) -> Run:
    """Return once every rank is here; the channel's deadline is how long to wait for them.

    Args:
        await_ready: returns once this rank needs nothing more of the store to begin with.

    Raises:
        ConfigError: the ranks were given different world sizes, or only some of them a node.
        CoordinationTimeout: a rank did not come; names it.
        StoreGone: see Channel.
    """
    if seat.rank == 0:
        run = _Host(channel, base, seat).run()
        await_ready()
        return run
    nonce = secrets.token_hex(8)
    join = {f"{base}/join/{seat.rank}": _join(nonce, seat)}
    prefix = _awaited(channel, f"{base}/welcome/{nonce}", put=join)
    # In this order: who has come in has a beat.
    come = {f"{prefix}/beat/{seat.rank}": "0", f"{prefix}/in/{seat.rank}": nonce}
    answer: Any = json.loads(_awaited(channel, f"{prefix}/open", put=come))
    # Order matters: upon `read` the store may go with rank 0, and torch tries one that has gone for a minute.
    await_ready()
    channel.put(f"{prefix}/read/{seat.rank}", nonce)
    if answer["error"]:
        raise ConfigError(answer["error"])
    return Run(prefix, tuple(answer["nodes"]), tuple(answer["hosts"]))


def _join(nonce: str, seat: Seat) -> str:
    row = {"nonce": nonce, "world_size": seat.world_size, "node": seat.node}
    return json.dumps(row | {"dead_after": seat.dead_after_s, "host": _this_host()})


def _this_host() -> str:
    """Equal for processes that share memory: of one container, or of one machine without any."""
    return f"{socket.gethostname()} {boot_id()}"


def _awaited(channel: Channel, key: str, *, put: Mapping[str, str]) -> str:
    values = channel.await_values([key], put=put)
    if not values:
        raise CoordinationTimeout(
            "rank 0 has not answered in time: nothing was changed. Every rank must make its TorchStore, "
            f"the same number of times and with the same address: {_ANEW}; look whether rank 0 runs",
            rank=0,
        )
    return values[0]


_ANEW = "give all ranks a new StoreOptions(name=) where only some processes were started anew"
"""Each counts the TorchStores that it has made."""


class _Host:
    """Rank 0's part."""

    def __init__(self, channel: Channel, base: str, seat: Seat) -> None:
        self._channel = channel
        self._base = base
        self._prefix = f"{base}/{secrets.token_hex(8)}"
        self._seat = seat
        self._others = range(1, seat.world_size)
        self._welcomed: dict[int, str] = {}

    def run(self) -> Run:
        joins = self._gathered()
        everyone = [json.loads(_join("", self._seat)), *joins]
        error = _problem(everyone)
        nodes = [one["node"] for one in everyone]
        hosts = [one["host"] for one in everyone]
        self._open(json.dumps({"error": error, "nodes": nodes, "hosts": hosts}))
        if error:
            raise ConfigError(error)
        return Run(self._prefix, tuple(nodes), tuple(hosts))

    def _gathered(self) -> list[dict[str, Any]]:
        """The joins of all other ranks, each of a process that is here now."""
        beat = {f"{self._prefix}/beat/0": "0"}
        keys = [f"{self._base}/join/{rank}" for rank in self._others]
        arrivals = [f"{self._prefix}/in/{rank}" for rank in self._others]
        if not keys:
            self._channel.put_all(beat)
        while keys:
            texts = self._channel.await_values(keys, put=beat)
            if texts is None:
                self._complain(self._channel.missing(keys))
            joins = [json.loads(text) for text in texts or []]
            again = self._channel.until(time.monotonic() + _AGAIN_S)
            # An earlier run may have left its joins: then these do not arrive, and theirs are replaced.
            nonces = again.await_values(arrivals, put=self._welcomes(joins))
            if nonces and nonces == [join["nonce"] for join in joins]:
                return joins
            if time.monotonic() > self._channel.deadline:
                self._complain(self._channel.missing(arrivals))
        return []

    def _welcomes(self, joins: list[dict[str, Any]]) -> dict[str, str]:
        """What to say to those who have come since the last time."""
        found = {}
        for rank, join in zip(self._others, joins, strict=False):
            nonce = join["nonce"]
            if self._welcomed.get(rank) != nonce:
                self._channel.delete(self._welcome_of(rank))
                found[f"{self._base}/welcome/{nonce}"] = self._prefix
                self._welcomed[rank] = nonce
        return found

    def _welcome_of(self, rank: int) -> list[str]:
        nonce = self._welcomed.get(rank)
        return [] if nonce is None else [f"{self._base}/welcome/{nonce}"]

    def _open(self, answer: str) -> None:
        """Tell all ranks, and leave no other key behind."""
        told = {f"{self._prefix}/open": answer}
        read = [f"{self._prefix}/read/{rank}" for rank in self._others]
        if not read:
            self._channel.put_all(told)
        else:
            # Order matters: the store may go with this rank, which is free to go from here on.
            self._channel.until(time.monotonic() + _READ_S).await_values(read, put=told)
        for rank in self._others:
            read += self._welcome_of(rank)
            read += [f"{self._base}/join/{rank}", f"{self._prefix}/in/{rank}"]
        self._channel.delete(read)

    def _complain(self, keys: list[str]) -> None:
        ranks = [int(key.rsplit("/", 1)[1]) for key in keys]
        raise CoordinationTimeout(
            f"of {self._seat.world_size} ranks these have not come in time: {ranks[:16]}: nothing was "
            "changed. Every rank must make its TorchStore, the same number of times and with the same "
            f"address: {_ANEW}; look for a rank that died, or raise `timeout`",
            rank=ranks[0] if ranks else None,
        )


def _problem(joins: list[dict[str, Any]]) -> str:
    for rank, join in enumerate(joins):
        for field in ("world_size", "dead_after"):
            if join[field] != joins[0][field]:
                return (
                    f"rank {rank} was given {field}={join[field]} and rank 0 "
                    f"{field}={joins[0][field]}: they must be equal"
                )
        if (join["node"] is None) != (joins[0]["node"] is None):
            return f"ranks 0 and {rank}: either every rank is given a node, or none is"
    return ""
