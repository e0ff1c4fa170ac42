"""The training of one way, whose iterations sleep, and what saves it. Needs torch."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_core.bench import workloads
from ckpt_core.bench.contenders import Profile, State
from ckpt_core.bench.contenders.torch_save import TorchSaveFsync
from ckpt_core.bench.papers.ways import IDEAL, TORCH
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.options import Options
from ckpt_core.save import SaveHandle
from ckpt_core.units import ALIGN_BYTES, align_up

_HEADER_BYTES = 2**16
_HEADER_OF_LEAF_BYTES = 2**10
"""More than the data map of a shard takes, for each leaf."""

_PAST = 2
"""Iterations behind a save that is checked: its copy must not have taken anything of them."""

Answer = dict[str, Any]


class Saver:
    """What a block of training needs of whoever saves; this one saves nothing and waits for nothing."""

    def save(self, step: int) -> None:
        """Start a checkpoint."""

    def barrier(self) -> None:
        """Return when training may change the state."""

    def drain(self) -> None:
        """Return when every checkpoint is durable; raises what failed."""

    def restore(self) -> int | None:
        """Fill the state from the newest checkpoint; its step, where that is known."""
        raise LookupError("nothing was saved")

    def tidy(self) -> None:
        """Remove what nobody needs any more; never timed."""


class Torch(Saver):
    """torch.save and fsync, while training stands still: when `save` returns, it is durable."""

    def __init__(self, root: Path, state: State, timeout_s: float) -> None:
        self._contender = TorchSaveFsync(Profile(root, timeout_s=timeout_s))
        self._state = state

    def save(self, step: int) -> None:
        """Write, and wait for the disk."""
        self._contender.save(self._state, step).wait_durable()

    def restore(self) -> int | None:
        """Load the newest file."""
        self._contender.load_into(self._state)
        return None

    def tidy(self) -> None:
        """Remove older files."""
        self._contender.tidy()


class Engine(Saver):
    """This engine under a preset. Retention is part of its save."""

    def __init__(self, checkpointer: Checkpointer, state: State, *, at_once: bool) -> None:
        """Over an open engine; `at_once`: training waits for the snapshot right behind the save."""
        self._checkpointer = checkpointer
        self._state = state
        self._at_once = at_once
        self._handles: list[SaveHandle] = []

    def save(self, step: int) -> None:
        """Start it; what that does at once is the preset's."""
        self._handles.append(self._checkpointer.save(step, self._state))
        if self._at_once:
            self._checkpointer.wait_staged()

    def barrier(self) -> None:
        """The snapshot is out of the way."""
        self._checkpointer.wait_staged()

    def drain(self) -> None:
        """Everything is committed."""
        while self._handles:
            self._handles.pop().committed.result()

    def restore(self) -> int | None:
        """The newest committed step."""
        found = self._checkpointer.restore(self._state)
        return None if found is None else found.step


class StandIn:
    """A state of a given size and iterations of a given length; who saves it changes from turn to turn."""

    def __init__(self, *, state_bytes: int, leaves: int, iteration_s: float) -> None:
        """Allocate and fill the state."""
        self._state = workloads.large_state(state_bytes=state_bytes, leaves=leaves)
        self._iteration_s = iteration_s
        self._step = 0

    @property
    def state_bytes(self) -> int:
        """As it came out."""
        return sum(tensor.nbytes for tensor in self._state.values())

    @contextlib.contextmanager
    def saver(self, way: dict[str, Any], root: Path, timeout_s: float) -> Iterator[Saver]:
        """Whoever saves under this way, ready: its memory is allocated. Closed at the end.

        Args:
            way: fields of `Way`.
            root: of its checkpoints; what lies there from earlier turns is reused.
            timeout_s: of the engine's waits.
        """
        if way["contender"] == IDEAL:
            yield Saver()
            return
        root.mkdir(exist_ok=True)
        if way["contender"] == TORCH:
            yield Torch(root, self._state, timeout_s)
        else:
            with Checkpointer(root, self._options(way, timeout_s)) as checkpointer:
                checkpointer.prepare(self._state)
                yield Engine(checkpointer, self._state, at_once=way["barrier_at_once"])
        # What a turn leaves in memory must not be freed or written in the next one's time.
        gc.collect()
        os.sync()

    def warm_up(self, saver: Saver, saves: int) -> None:
        """Untimed saves one right behind the other, so that all files that will be reused are there."""
        for _ in range(saves):
            self._save(saver)
            self._update(saver)
        saver.drain()
        saver.tidy()

    def train(self, saver: Saver, *, every: int, saves: int) -> Answer:
        """Whole intervals, each beginning with a save, until the last is over and everything is durable.

        Training stands still behind the last interval: else as many checkpoints as may be under way
        would be for nothing in a block of a few.
        """
        gc.collect()
        stalls_s: list[float] = []
        began = time.perf_counter()
        for number in range(every * saves):
            stall_s = self._save(saver) if number % every == 0 else 0.0
            time.sleep(self._iteration_s)
            stall_s += self._update(saver)
            if number % every == 0:
                stalls_s.append(stall_s)
        saver.drain()
        seconds = time.perf_counter() - began
        saver.tidy()
        return {"seconds": seconds, "iterations": every * saves, "stalls_s": stalls_s}

    def persist(self, saver: Saver) -> float:
        """Seconds from `save` until the checkpoint is durable, with nothing beside it."""
        self._change()
        gc.collect()
        began = time.perf_counter()
        self._save(saver)
        saver.drain()
        seconds = time.perf_counter() - began
        saver.tidy()
        return seconds

    def check(self, saver: Saver) -> bool:
        """Save, train on, destroy the state, restore the newest checkpoint: is it what was saved?"""
        self._change()
        self._save(saver)
        live, saved_at = workloads.digest(self._state), self._step
        for _ in range(_PAST):
            time.sleep(self._iteration_s)
            self._update(saver)
        saver.drain()
        workloads.scramble(self._state)
        restored_step = saver.restore()
        newest = restored_step in (saved_at, None)
        return newest and workloads.digest(self._state) == live

    # -- inside ----------------------------------------------------------------------------------

    def _save(self, saver: Saver) -> float:
        """Seconds that the call takes."""
        began = time.perf_counter()
        saver.save(self._step)
        return time.perf_counter() - began

    def _update(self, saver: Saver) -> float:
        """Change the state as an optimizer does, behind the barrier; seconds spent at that."""
        began = time.perf_counter()
        saver.barrier()
        seconds = time.perf_counter() - began
        self._change()
        return seconds

    def _change(self) -> None:
        """The first element of every leaf is the step, so that leaves of two steps can be told apart."""
        self._step += 1
        for tensor in self._state.values():
            tensor.view(-1)[0] = self._step

    def _options(self, way: dict[str, Any], timeout_s: float) -> Options:
        """The preset, with what the way changes. One kept step: figures do not depend on how many."""
        changes: dict[str, Any] = {"keep_last": 1, "timeout": timeout_s, **way["changes"]}
        whole = self.state_bytes + _HEADER_BYTES + len(self._state) * _HEADER_OF_LEAF_BYTES
        if way["chunks"]:
            changes["chunk_bytes"] = align_up(-(-whole // way["chunks"]), ALIGN_BYTES)
            chunks = int(way["staging_states"] * way["chunks"])
            changes["staging_bytes"] = chunks * changes["chunk_bytes"]
        elif way["staging_states"] is not None:
            size = Options.preset(way["contender"]).chunk_size
            changes["staging_bytes"] = align_up(int(way["staging_states"] * whole), size)
        return Options.preset(way["contender"], **changes)
