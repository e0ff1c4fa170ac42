"""One rank: it holds one state and every way to save it, and does what the parent tells all ranks.

Started as `python -m ckpt_core.bench.ranks.worker rank-N ROOT FD`, with the messages of
`ckpt_core.bench.worker`. All ranks get the same requests, in this order: rank 0 alone: host; join, hello,
then for each workload: build -> open each way -> save, check, train, tidy -> drop.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckpt_core.bench.contenders import Handle, Profile, way_class
from ckpt_core.bench.meeting import Member
from ckpt_core.bench.ranks.ways.base import Way
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.worker import StateWorker


class RankWorker(Member, StateWorker):
    """One rank of a team."""

    def __init__(self, name: str, root: Path) -> None:
        Member.__init__(self, name, root)
        StateWorker.__init__(self)
        self._ways: dict[str, Way] = {}
        self._steps: dict[str, int] = {}

    def hello(self, names: list[str]) -> Answer:
        """What the report says about each way."""
        return {name: self._introduction(way_class(name)) for name in names}

    def _meet(self) -> None:
        dist.barrier()

    def build(self, workload: str, **size: Any) -> Answer:
        """The same on each rank; a model is trained by all of them."""
        built = super().build(workload, **size)
        if self._training is not None:
            self._training.model = DistributedDataParallel(self._training.model)
        return built

    def open(self, name: str, folder: str, staging_bytes: int | None, timeout_s: float) -> Answer:
        """Construct a way on a directory that all ranks share."""
        root = self._root / folder / name
        root.mkdir(parents=True, exist_ok=True)
        self._ways[name] = way_class(name)(Profile(root, staging_bytes, timeout_s, self._rank))
        self._steps[name] = 0
        return {}

    def save(self, name: str) -> Answer:
        """One save, begun together; what this rank has written for it."""
        way, step = self._next(name)
        answer = self._time_save(way, step)
        return {**answer, "persisted_s": way.persisted_s(), "file_bytes": way.file_bytes()}

    def check(self, name: str) -> Answer:
        """Save, destroy this rank's state, restore it, compare."""
        self.save(name)
        return self._destroy_and_restore(self._ways[name])

    def train(self, name: str, every: int, steps: int) -> Answer:
        """In lockstep; see `_time_training`."""

        def save() -> Handle:
            way, step = self._next(name)
            return way.save(self._state, step)

        return self._time_training(save, every=every, steps=steps)

    def _next(self, name: str) -> tuple[Way, int]:
        self._steps[name] += 1
        return self._ways[name], self._steps[name]

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
        self._free()
        return {}

    def close(self) -> None:
        """End of the process."""
        self.drop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _introduction(self, way: type[Way]) -> Answer:
        reason = way.available(self._root)
        return {
            "reason": reason,
            "version": "" if reason else way.version(),
            "title": way.title,
            "fsyncs": way.fsyncs,
            "stands_for": way.stands_for,
        }
