"""Ranks as threads of one process: the same store, the same code, no processes to start."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ckpt_core.coordination import StoreOptions, TorchStore
from ckpt_core.coordination.client import open_store, serve


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks up the name of each peer, for its log; where no name server answers, that takes seconds."""
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")


Work = Callable[[TorchStore], Any]
_NUMBERS = itertools.count()


class Ranks:
    """TorchStores of all ranks of one run, and a way to let all of them do something at once."""

    def __init__(self, world_size: int, nodes: Sequence[str | None], options: StoreOptions) -> None:
        self.server = serve("127.0.0.1", 0)
        self.world_size = world_size
        self.stores: list[TorchStore] = []

        def join(rank: int) -> TorchStore:
            return TorchStore(
                "127.0.0.1",
                self.server.port,
                rank=rank,
                world_size=world_size,
                node=nodes[rank],
                options=options,
            )

        found = self._all([lambda rank=rank: join(rank) for rank in range(world_size)])
        for one in found:
            if isinstance(one, BaseException):
                raise one
        self.stores = found

    def do(self, work: Work) -> list[Any]:
        """Every rank's result, or what it raised."""
        return self._all([lambda store=store: work(store) for store in self.stores])

    def keys(self) -> int:
        client = open_store("127.0.0.1", self.server.port, 30.0)
        return int(client.num_keys())

    def close(self) -> None:
        self._all([store.close for store in self.stores])

    def _all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = [TimeoutError("still running")] * len(jobs)

        def run(index: int) -> None:
            try:
                results[index] = jobs[index]()
            except BaseException as exc:
                results[index] = exc

        threads = [
            threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        return results


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Makes Ranks: `ranks(3)`, `ranks(nodes="aab")`, `ranks(2, dead_after=1.0)`."""
    with contextlib.ExitStack() as stack:

        def make(world_size: int = 0, nodes: str = "", **settings: Any) -> Ranks:
            world_size = world_size or len(nodes)
            # A port of one of these may come again, for another number of ranks.
            settings.setdefault("name", f"crew {next(_NUMBERS)}")
            options = StoreOptions(timeout=60.0, **settings)
            made = Ranks(world_size, list(nodes) or [None] * world_size, options)
            stack.callback(made.close)
            return made

        yield make
