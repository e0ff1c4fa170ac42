"""Jobs of two ranks whose main threads end while threads of the engine wait for the other rank.

`python -m tests.multirank.endings WAY JOBS FOLDER SEED` prints, as JSON, how each rank has ended. The ranks
are forked from a process with torch loaded, and end as any Python does: nothing calls `os._exit`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from ckpt_core import Checkpointer, Options, StoreOptions, TorchStore
from ckpt_core.bench.meeting import free_port
from ckpt_core.coordination import Ballot

LIMIT_S = 60
"""A rank that lives longer hangs: SIGALRM ends it."""

_AT_ONCE = 4
_KEPT: list[object] = []
"""What the ranks do not close."""


def waits_for_the_other_rank(store: TorchStore, folder: Path, chance: random.Random) -> None:
    """Rank 1 votes for a step that rank 0 never votes for; rank 0 keeps the store."""
    _commit(store, 1)
    if store.info.rank == 1:
        threading.Thread(target=_commit, args=(store, 2), daemon=True).start()
    time.sleep(chance.uniform(0, 0.1))


def saves(store: TorchStore, folder: Path, chance: random.Random) -> None:
    """Saves are in flight when the loop ends, well or badly."""
    options = Options(timeout=timedelta(seconds=20), on_error="warn")
    ck = Checkpointer(folder / "root", options, coordination=store)
    _KEPT.append(ck)
    state = {"weights": torch.ones(1 << 18), "moments": [torch.ones(1000) for _ in range(50)]}
    until = time.monotonic() + chance.uniform(0, 0.3)
    step = 0
    while time.monotonic() < until:
        step += 1
        ck.save(step, state)
    if chance.random() < 0.3:
        raise ZeroDivisionError("the loop failed")


def meets(store: TorchStore, folder: Path, chance: random.Random) -> None:
    """Another meeting begins, to which rank 0 does not come."""
    if store.info.rank == 1:
        _KEPT.append(_join(1, store._session._clients.address.port))
    time.sleep(chance.uniform(0, 0.1))


WAYS: dict[str, Callable[[TorchStore, Path, random.Random], None]] = {
    way.__name__: way for way in (waits_for_the_other_rank, saves, meets)
}


def _commit(store: TorchStore, step: int) -> None:
    attempt = store.attempt_id(step)
    store.agree(attempt, step, Ballot("plan", step), LIMIT_S)
    store.settle(attempt, step, None, LIMIT_S)


def _join(rank: int, port: int) -> TorchStore:
    options = StoreOptions(dead_after=3.0, timeout=float(LIMIT_S))
    return TorchStore("127.0.0.1", port, rank=rank, world_size=2, options=options)


def _interrupt(chance: random.Random) -> None:
    """Ctrl-C, one to four times at random instants, most of them at the end of the process."""
    main = threading.main_thread().ident
    assert main is not None
    times = [chance.uniform(0.001, 0.3) for _ in range(chance.randint(1, 4))]

    def ring() -> None:
        for pause_s in times:
            time.sleep(pause_s)
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=ring, daemon=True).start()


def rank_main(way: str, rank: int, port: int, folder: Path, seed: int) -> None:
    """What one rank does; it ends where this does."""
    signal.alarm(LIMIT_S)
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = _join(rank, port)
    _KEPT.append(store)
    chance = random.Random(seed)
    _interrupt(chance)
    WAYS[way](store, folder, chance)


def start(way: str, folder: Path, seed: int) -> list[int]:
    """Fork the ranks of one job; in each of them this ends by SystemExit."""
    folder.mkdir()
    port = free_port()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            rank_main(way, rank, port, folder, seed + rank)
            sys.exit()
        pids.append(pid)
    return pids


def main(way: str, jobs: int, place: Path, seed: int) -> None:
    """Run the jobs, some at once."""
    logging.getLogger("ckpt_core").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.freeze()
    codes: list[int] = []
    for first in range(0, jobs, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, jobs))
        started = [start(way, place / str(number), seed + 2 * number) for number in numbers]
        for pids in started:
            codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
