"""Agreement of several ranks through a `torch.distributed.TCPStore`."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

from ckpt_core.coordination.address import Address, checked_port, listens
from ckpt_core.coordination.agreement import Ballot, Json
from ckpt_core.coordination.bootstrap import (
    Exchange,
    GroupStore,
    MasterPort,
    Torchrun,
    await_listener,
    nth,
)
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import Clients, StoreGone, serve
from ckpt_core.coordination.meeting import Seat, meet
from ckpt_core.coordination.options import StoreOptions, own_address
from ckpt_core.coordination.session import Session
from ckpt_core.errors import CkptError, CommitError, ConfigError
from ckpt_core.types import RankInfo
from ckpt_core.units import parse_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PATIENCE_S = 30.0
"""A store that leaves a request unanswered for so long is gone; so it is, earlier, at the deadline."""

_WARM = 3
"""Connections opened ahead: two to wait on, one for everything else meanwhile."""


class TorchStore:
    """How the ranks of one job agree; give one to each rank's `Checkpointer`.

    Made on every rank, on the training thread; returns once all of them have. From then on everything
    runs on background threads over connections of its own: no collective, and no wait of training for a
    commit. Also `from_env` (torchrun), `from_process_group`, `from_exchange` (any broadcast: Horovod, MPI).

    Args:
        host: where the store listens, the same for every rank.
        port: TCP port; 0 is for a world of one.
        rank: of this process.
        world_size: number of ranks.
        node: None if all ranks write to one root; otherwise ranks with equal nodes share one.
        options: see StoreOptions; the same on every rank.

    Raises:
        ConfigError: an argument is wrong, or the ranks were given different ones.
        CoordinationTimeout: a rank did not come within `options.timeout`; names it.
        CommitError: the store broke meanwhile.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        node: str | int | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        options = options or StoreOptions()
        port, rank, world_size = _checked(host, port, rank, world_size)
        seat = Seat(rank, world_size, None if node is None else str(node), options.dead_after_s)
        try:
            self._session = _joined(host, port, seat, options)
        except StoreGone as exc:
            raise _unconnected(rank, exc) from exc

    @classmethod
    def from_env(
        cls,
        *,
        roots: Literal["shared", "node"] = "shared",
        options: StoreOptions | None = None,
    ) -> Self:
        """From the environment that torchrun sets, or a launcher like it (RANK, WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT). Needs no process group; one may be initialised before or after.

        Args:
            roots: "shared": all ranks write to one root; "node": those of each machine to one of theirs.
            options: see StoreOptions.

        Raises:
            ConfigError: a variable is missing, or something foreign listens at MASTER_PORT.
            CoordinationTimeout, CommitError: a rank did not come, or rank 0 came and left.
        """
        if roots not in ("shared", "node"):
            raise ConfigError(f"roots={roots!r} is unknown: use 'shared' or 'node'")
        options = options or StoreOptions()
        found = Torchrun.read()
        node = found.node if roots == "node" else None
        if found.agent:
            name = options.name or f"torchrun/{found.run}"
            options = replace(options, hosted=False, kept_by="torchrun's agent", name=name)
            return cls(
                found.host,
                found.port,
                rank=found.rank,
                world_size=found.world_size,
                node=node,
                options=options,
            )
        options = replace(options, address=options.address or found.host)
        master = MasterPort(found, options.timeout_s)
        made = cls.from_exchange(
            master.exchange,
            rank=found.rank,
            world_size=found.world_size,
            node=node,
            options=options,
        )
        # Kept for good: a rank whose process group comes next may be connected to it already, and would wait
        # for ever in a store that goes away.
        made._session.keep(master.kept)
        return made

    @classmethod
    def from_process_group(
        cls,
        group: ProcessGroup | None = None,
        *,
        node: str | int | None = None,
        options: StoreOptions | None = None,
    ) -> Self:
        """From an initialised process group, whose members are the ranks; None for the default one.

        The group serves to find the store, and for nothing else. It may be destroyed first.

        Raises:
            ConfigError: there is no such group, or this process is not in it.
        """
        found = GroupStore.of(group)
        import torch.distributed as dist

        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        options = options or StoreOptions()
        if found.tcp is None:
            return cls.from_exchange(
                found.exchange, rank=rank, world_size=world_size, node=node, options=options
            )
        name = options.name or f"group/{found.name}"
        options = replace(options, hosted=False, kept_by="the process group", name=name)
        made = cls(
            found.tcp.host,
            found.tcp.port,
            rank=rank,
            world_size=world_size,
            node=node,
            options=options,
        )
        # The store dies with the last reference in the process that keeps it, here perhaps.
        made._session.keep(found.tcp)
        return made

    @classmethod
    def from_exchange(
        cls,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        node: str | int | None = None,
        options: StoreOptions | None = None,
    ) -> Self:
        """Rank 0 opens a store on a free port and tells the others through `exchange`.

        Args:
            exchange: a broadcast from rank 0, called once on every rank: rank 0 passes a line of text, the
                others None, and all get rank 0's text. `lambda text: hvd.broadcast_object(text, 0)`.
            rank, world_size, node, options: as for TorchStore.

        Raises:
            ConfigError: rank 0 could open none; also whatever TorchStore raises.
        """
        options = options or StoreOptions()
        server: Any = None
        line: str | None = None
        if rank == 0:
            host = options.address or own_address()
            try:
                server = serve(host, 0)
                line = json.dumps([host, server.port, ""])
            except StoreGone as exc:
                line = json.dumps([host, 0, str(exc)])
        try:
            host, port, problem = json.loads(exchange(line))
        except StoreGone as exc:
            raise _unconnected(rank, exc) from exc
        if problem:
            raise ConfigError(
                f"rank 0: {problem}. Set StoreOptions(address=) to an address of that machine"
            )
        made = cls(
            host,
            port,
            rank=rank,
            world_size=world_size,
            node=node,
            options=replace(options, hosted=False),
        )
        if server is not None:
            made._session.keep(server)
        return made

    # -- Coordination ----------------------------------------------------------------------------

    @property
    def info(self) -> RankInfo:
        """See Coordination."""
        return self._session.info

    def gather(self, topic: str, value: Json, timeout_s: float) -> tuple[Json, ...]:
        """See Coordination."""
        return self._session.gather(topic, value, timeout_s)

    def call_id(self) -> str:
        """See Coordination."""
        return self._session.call_id()

    def leave(self, call: str, mine: Json, others: Json) -> None:
        """See Coordination."""
        self._session.leave(call, mine, others)

    def attempt_id(self, step: int) -> str:
        """See Coordination."""
        return self._session.attempt_id(step)

    def count_anew(self, word: str) -> None:
        """See Coordination."""
        self._session.count_anew(word)

    def agree(
        self, attempt_id: str, step: int, ballot: Ballot, timeout_s: float
    ) -> tuple[Json, ...]:
        """See Coordination. The steps are in docs/protocol.md."""
        return self._session.agree(attempt_id, step, ballot, timeout_s)

    def settle(
        self, attempt_id: str, step: int, error: BaseException | None, timeout_s: float
    ) -> None:
        """See Coordination."""
        self._session.settle(attempt_id, step, error, timeout_s)

    def decline(self, attempt_id: str, step: int, error: BaseException) -> None:
        """See Coordination."""
        self._session.decline(attempt_id, step, error)

    def refusal(self, attempt_id: str, step: int, timeout_s: float) -> CkptError | None:
        """See Coordination."""
        return self._session.refusal(attempt_id, step, timeout_s)

    def tell_once(self, topic: str, value: Json, timeout_s: float) -> Json:
        """Leave a value, not None, for all ranks; the first one stays. From any thread, by any rank.

        Returns:
            The value that stands.

        Raises:
            CommitError: the store cannot be reached.
        """
        return self._session.tell_once(topic, value, timeout_s)

    def told(self, topic: str, timeout_s: float) -> Json | None:
        """What `tell_once` of any rank has left; None: nothing yet. Never waits for it.

        Raises:
            CommitError: the store cannot be reached.
        """
        return self._session.told(topic, timeout_s)

    def close(self) -> None:
        """See Coordination. Done at exit too, if it was forgotten."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _unconnected(rank: int, exc: StoreGone) -> CommitError:
    return CommitError(f"rank {rank} could not connect: {exc}", rank=rank)


def _joined(host: str, port: int, seat: Seat, options: StoreOptions) -> Session:
    """Connect, and wait for the other ranks."""
    deadline = time.monotonic() + options.timeout_s
    server: Any = None
    hosts = options.hosted if options.hosted is not None else not listens(host, port)
    if seat.rank == 0 and hosts:
        server = serve(host, port)
        port = server.port
    address = Address(host, port, options.kept_by)
    await_listener(address, deadline)
    clients = Clients(address, patience_s=_PATIENCE_S)
    if server is not None:
        clients.kept.append(server)
    try:
        base = f"ckpt_core/{options.name}/{nth('run', host, port, options.name, seat.rank)}"
        channel = Channel(clients, deadline, options.beat_s)
        # Not later: connections are opened while nobody trains.
        await_others = clients.warm(_WARM, deadline)
        run = meet(channel, base, seat, await_others)
        return Session(clients, run, seat.rank, options)
    except BaseException:
        clients.close()
        raise


def _checked(host: str, port: int, rank: int, world_size: int) -> tuple[int, int, int]:
    if not host or not isinstance(host, str):
        raise ConfigError(
            f"host={host!r} is no host: give the name or address that all ranks reach"
        )
    port, rank = checked_port(port, "port"), parse_count(rank, field="rank", least=0)
    world_size = parse_count(world_size, field="world_size")
    if rank >= world_size:
        raise ConfigError(f"rank={rank} of world_size={world_size}: rank must be 0 .. world_size-1")
    if port == 0 and world_size > 1:
        raise ConfigError("port=0: the other ranks could not know it; use TorchStore.from_exchange")
    return port, rank, world_size
