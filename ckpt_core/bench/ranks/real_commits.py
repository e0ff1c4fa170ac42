"""What a TCPStore can do here, and commits of many ranks through a real one.

Runs in a process of its own: `python -m ckpt_core.bench.ranks.real_commits COMMITS RANKS...` prints one JSON
object. The ranks are threads of this one process, each with a `TorchStore` of its own, and the store is
another process: so what the ranks do takes one processor in all, and what the store does another.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ckpt_core.bench.meeting import HOST
from ckpt_core.bench.ranks.store_process import StoreProcess
from ckpt_core.bench.remote import run_module
from ckpt_core.coordination import Ballot, StoreOptions, TorchStore

_CLIENTS = 4
_REQUESTS = 2000
_MANY_KEYS = 1000
_TIMEOUT_S = 300.0
# TCPStore asks for the name of every client's address, which takes long where no name server answers.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoreRate:
    """What a TCPStore costs here.

    Attributes:
        clients: threads that asked at the same time.
        messages_per_s: that they got answered; no more than they could ask.
        message_s: processor time of the store for one message.
        key_s: and for each key beyond the first.
    """

    clients: int
    messages_per_s: float
    message_s: float
    key_s: float


@dataclass(frozen=True, slots=True)
class RealCommits:
    """Commits of one number of ranks, all votes at once.

    Attributes:
        seconds: of each commit, from the first vote to the last rank that goes on.
        cpu_s: processor time of all ranks together, for one commit.
    """

    ranks: int
    seconds: list[float]
    cpu_s: float


def measure(commits: int, ranks: tuple[int, ...]) -> Row:
    """Measure in a new process: {"store": StoreRate, "commits": [RealCommits]} as plain values.

    Raises:
        CkptError: the process failed.
    """
    numbers = [commits, *ranks]
    found: Row = run_module(__name__, numbers, what="real commits", environment=_ENVIRONMENT)
    return found


def store_rate(store: StoreProcess) -> StoreRate:
    """Load the store with short questions of several clients, then with long ones of one client."""
    clients = [store.client() for _ in range(_CLIENTS)]
    keys = [f"key/{number}" for number in range(_MANY_KEYS)]
    for key in keys:
        clients[0].set(key, "value")

    def ask(client: Any) -> None:
        for _ in range(_REQUESTS):
            client.check(keys[:1])

    def ask_much() -> None:
        for _ in range(_REQUESTS // 20):
            clients[0].check(keys)

    ask(clients[0])
    with ThreadPoolExecutor(_CLIENTS) as pool:
        wall_s, cpu_s = _timed(store, lambda: list(pool.map(ask, clients)))
    messages = _CLIENTS * _REQUESTS
    _, much_s = _timed(store, ask_much)
    message_s = cpu_s / messages
    key_s = max(much_s / (_REQUESTS // 20) - message_s, 0.0) / (_MANY_KEYS - 1)
    return StoreRate(_CLIENTS, messages / wall_s, message_s, key_s)


def _timed(store: StoreProcess, action: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the store's processor."""
    cpu_s, began = store.cpu_s(), time.perf_counter()
    action()
    return time.perf_counter() - began, store.cpu_s() - cpu_s


def real_commits(store: StoreProcess, ranks: int, commits: int) -> RealCommits:
    """That many commits, one after the other, after one that only warms up."""
    options = StoreOptions(name=f"{ranks} ranks")
    with ThreadPoolExecutor(ranks) as pool:

        def join(rank: int) -> TorchStore:
            return TorchStore(HOST, store.port, rank=rank, world_size=ranks, options=options)

        stores = list(pool.map(join, range(ranks)))
        try:
            _commit(pool, stores, 0)
            cpu_s = time.process_time()
            seconds = [_commit(pool, stores, step) for step in range(1, commits + 1)]
            return RealCommits(ranks, seconds, (time.process_time() - cpu_s) / commits)
        finally:
            # Others first: rank 0 waits for them.
            for one in reversed(stores):
                one.close()


def _commit(pool: ThreadPoolExecutor, stores: list[TorchStore], step: int) -> float:
    """All ranks vote at once; seconds until the last one goes on."""
    start = threading.Barrier(len(stores))

    def take_part(store: TorchStore) -> tuple[float, float]:
        attempt = store.attempt_id(step)
        start.wait(_TIMEOUT_S)
        began = time.perf_counter()
        store.agree(attempt, step, Ballot("plan", ["rank-00000.json", 4096, "xxh3"]), _TIMEOUT_S)
        store.settle(attempt, step, None, _TIMEOUT_S)
        return began, time.perf_counter()

    times = list(pool.map(take_part, stores))
    return max(end for _, end in times) - min(begin for begin, _ in times)


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    commits, *ranks = [int(argument) for argument in arguments]
    with StoreProcess() as store:
        rate = store_rate(store)
        found = [asdict(real_commits(store, number, commits)) for number in ranks]
    print(json.dumps({"store": asdict(rate), "commits": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
