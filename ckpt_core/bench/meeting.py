"""How ranks find each other: at a store of torch's, which the first of them hosts."""

from __future__ import annotations

import socket
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package imports this, and runs that as a program
    from ckpt_core.bench.serving import Answer

HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=60)


def store_class() -> Any:
    """`TCPStore`, which torch re-exports without declaring it exported."""
    return import_module("torch.distributed").TCPStore


def free_port() -> int:
    """A port for a server that is given its port and cannot be asked for it: the system gives it to nobody
    else for a minute.

    It stays behind in TIME_WAIT: a server, which asks for SO_REUSEADDR, may listen there, and nobody who
    takes any port gets it meanwhile, as could happen with one that was only free a moment ago.
    """
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        with socket.create_connection((HOST, port)):
            listener.accept()[0].close()  # first, so that the one who waits is on the server's side
    return port


def host_store() -> Any:
    """A new store on a free port; it ends with the last reference to it."""
    return store_class()(HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def connected(port: int, *, wait: bool = True) -> Any:
    """A connection to the store on that port; `wait`: until all ranks of a job have one."""
    return store_class()(HOST, port, is_master=False, wait_for_workers=wait, timeout=_TIMEOUT)


class Member:
    """The requests by which a worker becomes a rank of `ckpt_core.bench.team.Ranks`: base of such workers."""

    def __init__(self, name: str, root: Path) -> None:
        """`name` is "rank-N", `root` the directory of all ranks."""
        self._rank = int(name.removeprefix("rank-"))
        self._root = root
        self._store: Any = None  # kept alive: all ranks depend on it

    def host(self) -> Answer:
        """Start the store through which the ranks find each other; asked of the first rank alone."""
        self._store = host_store()
        return {"port": self._store.port}

    def join(self, port: int, world_size: int) -> Answer:
        """Become a rank of a job; returns when all are there."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", store=connected(port), rank=self._rank, world_size=world_size
        )
        return {}
