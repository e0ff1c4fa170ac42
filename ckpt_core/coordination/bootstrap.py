"""Where a run's store is: found out from torchrun's environment or from a process group."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_core.coordination.address import Address, checked_port, listens
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import Clients, Store, StoreGone, open_store
from ckpt_core.errors import ConfigError, CoordinationTimeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CALLS: Counter[object] = Counter()
_POLL_S = 0.05


def nth(*what: object) -> int:
    """How often this was asked before in this process. Ranks that do the same things get the same number."""
    _CALLS[what] += 1
    return _CALLS[what] - 1


def await_listener(address: Address, deadline: float) -> None:
    """Return once something accepts connections at `address`.

    Raises:
        CoordinationTimeout: nothing has, until `deadline` (monotonic).
    """
    while not listens(address.host, address.port):
        if time.monotonic() > deadline:
            raise CoordinationTimeout(
                f"no store listens at {address}: nothing was changed. Look whether that process runs and "
                "whether this machine reaches it; raise `timeout` if it merely starts late"
            )
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What torchrun, and launchers like it, tell a process.

    Attributes:
        rank, world_size, host, port: as init_process_group takes them.
        node: which machine this is.
        agent: whether the agent keeps a store there, or rank 0 is expected to.
        run: the name of the job.
    """

    rank: int
    world_size: int
    host: str
    port: int
    node: str
    agent: bool
    run: str

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Torchrun:
        """From the environment.

        Raises:
            ConfigError: a variable is missing, no number, or no port.
        """
        return cls(
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            host=_text(environment, "MASTER_ADDR"),
            port=_port(environment, "MASTER_PORT"),
            node=environment.get("GROUP_RANK") or socket.gethostname(),
            agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
            run=environment.get("TORCHELASTIC_RUN_ID", ""),
        )


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise ConfigError(
            f"{name} is not set: start the ranks with torchrun, or use TorchStore(host, port, rank=, "
            "world_size=) or TorchStore.from_process_group()"
        )
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a number")
    return int(text)


def _port(environment: Mapping[str, str], name: str) -> int:
    return checked_port(_number(environment, name), name)


class MasterPort:
    """Hands a line of text from rank 0 to all ranks through a store at MASTER_PORT.

    The store that init_process_group opens there, before or after, is shared: within one process torch
    lets several users have one, if they all say `multi_tenant`, as it does itself.
    """

    def __init__(self, found: Torchrun, timeout_s: float) -> None:
        self._found = found
        self._timeout_s = timeout_s
        self._key = (
            f"ckpt_core/address/{found.run}/{nth('address', found.host, found.port, found.rank)}"
        )
        self.kept: Store = None

    def exchange(self, text: str | None) -> str:
        """`text` of rank 0, on every rank. Rank 0 keeps the store until `kept` is let go.

        Raises:
            ConfigError: something else listens there.
            CoordinationTimeout: rank 0 did not come.
            StoreGone: rank 0 came and left.
        """
        if text is not None:
            self.kept = self._open()
            self.kept.set(self._key, text)
            return text
        deadline = time.monotonic() + self._timeout_s
        address = Address(self._found.host, self._found.port, "rank 0")
        await_listener(address, deadline)
        clients = Clients(address, patience_s=self._timeout_s)
        try:
            channel = Channel(clients, deadline, self._timeout_s)
            answer = channel.read(self._key) if channel.wait([self._key]) else None
        finally:
            clients.close()
        if answer is None:
            raise CoordinationTimeout(
                f"rank 0 has not made its TorchStore in time (asked at {address}): nothing was changed",
                rank=0,
            )
        return answer

    def _open(self) -> Store:
        host, port = self._found.host, self._found.port
        try:
            return open_store(host, port, self._timeout_s, is_master=True, multi_tenant=True)
        except RuntimeError as exc:
            raise ConfigError(
                f"rank 0 cannot open a store at MASTER_ADDR:MASTER_PORT={host}:{port}: "
                f"{str(exc).splitlines()[0][:200]}. Use "
                "TorchStore.from_process_group(), or exchange host and port and use TorchStore(host, port)"
            ) from exc


@dataclass(frozen=True, slots=True)
class GroupStore:
    """The store that a process group was made with.

    Attributes:
        store: as the group has it.
        name: of the group, and its first rank: no other group of the job has both.
        tcp: the TCPStore at the bottom; None if it is another kind.
    """

    store: Any
    name: str
    tcp: Any

    @classmethod
    def of(cls, group: ProcessGroup | None) -> GroupStore:
        """From a group of which this process is a member; None is the default group.

        Raises:
            ConfigError: there is no such group.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "no process group is initialised: call torch.distributed.init_process_group first, or use "
                "TorchStore.from_env() or TorchStore(host, port, rank=, world_size=)"
            )
        world = dist.distributed_c10d._world
        wanted: Any = group if group is not None else dist.group.WORLD
        found: Any = world.pg_map.get(wanted)
        if found is None or found[1] is None or dist.get_rank(wanted) < 0:
            raise ConfigError(
                f"group={group!r} is no process group of which this process is a member"
            )
        bottom = found[1]
        while hasattr(bottom, "underlying_store"):
            bottom = bottom.underlying_store
        tcp = bottom if type(bottom).__name__ == "TCPStore" else None
        # Danger: below groups that were split alike, torch gives others' groups the same names.
        name = f"{world.pg_names[wanted]}/{dist.get_process_group_ranks(wanted)[0]}"
        return cls(found[1], name, tcp)

    def exchange(self, text: str | None) -> str:
        """`text` of rank 0, on every rank, through the group's store.

        Raises:
            StoreGone: the store has not answered.
        """
        import torch.distributed as dist

        key = f"ckpt_core/address/{self.name}/{nth('group', self.name, dist.get_rank())}"
        try:
            if text is not None:
                self.store.set(key, text)
            return bytes(self.store.get(key)).decode()
        except RuntimeError as exc:
            raise StoreGone(f"the process group's store: {str(exc).splitlines()[0]}") from exc


Exchange = Callable[[str | None], str]
"""Rank 0 gives it a line of text, the others None; every rank gets rank 0's line."""
