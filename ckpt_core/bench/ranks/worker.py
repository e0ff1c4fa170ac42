"""One rank: it holds one state and every way to save it, and does what the parent tells all ranks.

Started as `python -m ckpt_core.bench.ranks.worker rank-N ROOT FD`, with the messages of
`ckpt_core.bench.worker`. All ranks get the same requests, in this order: rank 0 alone: host; join, hello,
then for each workload: build -> open each way -> save, check, train, tidy -> drop.
"""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckpt_core.bench import workloads
from ckpt_core.bench.contenders import State
from ckpt_core.bench.ranks.store_process import HOST, store_class
from ckpt_core.bench.ranks.ways import Place, Way, way_class
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.worker import Stalls

_STORE_TIMEOUT = timedelta(seconds=60)


class RankWorker:
    """One rank of a team."""

    def __init__(self, name: str, root: Path) -> None:
        self._rank = int(name.removeprefix("rank-"))
        self._root = root
        self._world_size = 1
        self._store: Any = None  # kept alive: all ranks depend on it
        self._ways: dict[str, Way] = {}
        self._steps: dict[str, int] = {}
        self._state: State = {}
        self._training: workloads.Training | None = None

    def hello(self, names: list[str]) -> Answer:
        """What the report says about each way."""
        return {name: _introduction(way_class(name)) for name in names}

    def host(self) -> Answer:
        """Start the store through which the ranks find each other."""
        self._store = store_class()(
            HOST, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
        return {"port": self._store.port}

    def join(self, port: int, world_size: int) -> Answer:
        """Become a rank of a job; returns when all are there."""
        self._world_size = world_size
        store = store_class()(HOST, port, is_master=False, timeout=_STORE_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=world_size)
        return {}

    def build(self, workload: str, **size: Any) -> Answer:
        """Allocate and fill the state of a workload: "large" or "training"."""
        if workload == "training":
            self._training = workloads.Training.start(size)
            self._state = self._training.state()
            self._training.model = DistributedDataParallel(self._training.model)
        else:
            self._state = workloads.large_state(**size)
        gc.collect()
        return {"state_bytes": sum(tensor.nbytes for tensor in self._state.values())}

    def open(self, name: str, folder: str, staging_bytes: int | None, timeout_s: float) -> Answer:
        """Construct a way on a directory that all ranks share."""
        root = self._root / folder / name
        root.mkdir(parents=True, exist_ok=True)
        self._ways[name] = way_class(name)(
            Place(root, self._rank, self._world_size, staging_bytes, timeout_s)
        )
        self._steps[name] = 0
        return {}

    def save(self, name: str) -> Answer:
        """One save, begun together, with the barrier right behind it: no compute hides the copy."""
        way = self._ways[name]
        self._steps[name] += 1
        workloads.mark(self._state, self._steps[name])
        gc.collect()
        dist.barrier()
        began = time.perf_counter()
        handle = way.save(self._state, self._steps[name])
        handle.barrier()
        released = time.perf_counter()
        handle.wait_durable()
        ended = time.perf_counter()
        return {
            "blocked_s": released - began,
            "durable_s": ended - began,
            "persisted_s": way.persisted_s(),
            "file_bytes": way.file_bytes(),
        }

    def check(self, name: str) -> Answer:
        """Save, destroy this rank's state, restore it, compare."""
        self.save(name)
        saved = workloads.digest(self._state)
        workloads.scramble(self._state)
        dist.barrier()
        self._ways[name].load_into(self._state)
        return {"saved": saved, "restored": workloads.digest(self._state)}

    def train(self, name: str, every: int, steps: int) -> Answer:
        """Train `steps` steps in lockstep, saving after each `every`-th from the first on; 0 saves never.

        What is in flight at the end is waited for outside the clock.
        """
        training = self._training
        assert training is not None, "build the training workload first"
        stalls = Stalls()
        dist.barrier()
        began = time.perf_counter()
        for number in range(steps):
            training.step(stalls.before_update)
            if every and number % every == 0:
                self._steps[name] += 1
                step = self._steps[name]
                stalls.start(partial(self._ways[name].save, self._state, step))
        seconds = time.perf_counter() - began
        stalls.finish()
        return {"step_s": seconds / steps, "stalls_s": stalls.seconds}

    def tidy(self, name: str) -> Answer:
        """Leave no old step and no dirty page behind for the next turn, whoever has it."""
        way = self._ways[name]
        way.tidy()
        if self._rank == 0:
            os.sync()
        return {"settings": way.settings}

    def drop(self) -> Answer:
        """Close every way and free the state."""
        while self._ways:
            self._ways.popitem()[1].close()
        self._steps.clear()
        self._training, self._state = None, {}
        gc.collect()
        return {}

    def close(self) -> None:
        """End of the process."""
        self.drop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _introduction(way: type[Way]) -> Answer:
    reason = way.obstacle()
    return {
        "reason": reason,
        "version": "" if reason else way.release(),
        "fsyncs": way.fsyncs,
        "stands_for": way.stands_for,
    }
