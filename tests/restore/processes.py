"""Ranks that are processes with a gloo group, for tests of what runs collectives."""

from __future__ import annotations

import faulthandler
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_core.restore import Restorer
from ckpt_core.system.files import Files
from ckpt_core.types import RankInfo
from tests.coordination.crew import CONTEXT

TIMEOUT_S = 60.0

Body = Callable[["Rank"], None]


class Rank:
    """One process of a test, which is its own coordination too: gathers go through a store."""

    def __init__(self, rank: int, world: int, place: Path) -> None:
        self.info = RankInfo(rank, world)
        self.place = place
        self.root = place / "ckpts"
        self._store = dist.FileStore(str(place / "store"))
        self._store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._calls: Counter[str] = Counter()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def gather(self, topic: str, value: Any, timeout_s: float) -> tuple[Any, ...]:
        key = f"{topic}/{self._calls[topic]}"
        self._calls[topic] += 1
        self._store.set(f"{key}/{self.info.rank}", json.dumps(value))
        texts = [self._store.get(f"{key}/{rank}") for rank in range(self.info.world_size)]
        return tuple(json.loads(text) for text in texts)

    def call_id(self) -> str:
        self._calls[""] += 1
        return str(self._calls[""])

    def leave(self, call: str, mine: Any, others: Any) -> None:
        """Nobody is interrupted here."""

    def count_anew(self, word: str) -> None:
        """Nobody saves here."""

    def restorer(self, *, shown: bool = False) -> Restorer:
        return Restorer(
            self.root,
            files=Files(),
            readers=2,
            timeout_s=TIMEOUT_S,
            coordination=self,  # type: ignore[arg-type]
            shown=shown,
        )


def run_ranks(world: int, place: Path, body: Body) -> None:
    """Run `body` in `world` processes; raises what the first failing one has raised."""
    failures = CONTEXT.SimpleQueue()
    processes = [
        CONTEXT.Process(target=_work, args=(rank, world, place, body, failures))
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(2 * TIMEOUT_S)
        assert failures.empty(), failures.get()
        assert [process.exitcode for process in processes] == [0] * world
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _work(rank: int, world: int, place: Path, body: Body, failures: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(1.5 * TIMEOUT_S)  # says where, should it hang
    try:
        member = Rank(rank, world, place)
        body(member)
        member.gather("end", None, TIMEOUT_S)
        # Not destroy_process_group: up to torch 2.6 it may wait, with the GIL, for a thread of gloo that
        # needs the GIL to let go of a tensor.
        os._exit(0)
    except BaseException:
        failures.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise
