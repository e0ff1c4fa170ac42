"""The processes of nodes that keep one another's steps, and of those that exchange theirs by lm-resiliency.

Each rank is a node: it has a root, an agent and a place for what it keeps, in one folder for all of them.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ckpt_core.bench import workloads
from ckpt_core.bench.agents import agent_of, end
from ckpt_core.bench.contenders import State
from ckpt_core.bench.levels.copying import copy_seconds
from ckpt_core.bench.levels.worker import Worker, pin
from ckpt_core.bench.meeting import Member
from ckpt_core.bench.serving import Answer
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.coordination import TorchStore
from ckpt_core.levels import read_status
from ckpt_core.options import Level, Options
from ckpt_core.store import step_path

_WAIT_S = 120.0
_LEAST_BYTES, _LEAST_LEAVES = 64 << 10, 4


class NodeWorker(Member, Worker):
    """One node; all get the same requests at once."""

    def __init__(self, name: str, root: Path) -> None:
        Worker.__init__(self, "ckpt_core", root)
        Member.__init__(self, name, root)
        self._sent = 0
        torch.set_num_threads(1)
        random.seed(0)  # all nodes hold their agents in the same windows

    def meet(self, home: str, shape: str) -> Answer:
        """A Checkpointer of this node, whose steps the others keep: whole, or as parity of that shape."""
        place = Path(home) / f"node-{self._rank}"
        how: dict[str, Any] = {"parity": shape} if shape else {"peers": 1}
        level = Level(**how, bind="lo:0", dir=place / "kept")
        met = TorchStore.from_process_group(node=f"node-{self._rank}")
        self._ck = Checkpointer(place / "root", Options(), coordination=met, levels=[level])
        self._kept, self._sent = "parity" if shape else "peers", 0
        return {}

    def go_on(self, home: str, shape: str) -> Answer:
        """Back on all nodes from what they have left: from the making of the Checkpointer on."""
        workloads.scramble(self._state)
        began = time.perf_counter()
        self.meet(home, shape)
        assert self._ck is not None
        self._ck.restore(self._state)
        took_s, digest = time.perf_counter() - began, workloads.digest(self._state)
        self._ck.wait(level=self._kept)  # so that another node may be lost
        return {"seconds": took_s, "digest": digest}

    def save_and_reach(self) -> Answer:
        """One save of this node's own state, until what others keep of it is verified there."""
        assert self._ck is not None
        self._step += 1
        workloads.mark(self._state, self._step)
        began = time.perf_counter()
        handle = self._ck.save(self._step, self._state, per_rank=self._private())
        call_s = time.perf_counter() - began
        handle.committed.result(_WAIT_S)
        committed_s = time.perf_counter() - began
        handle.reached(self._kept).result(_WAIT_S)
        answer = {"call_s": call_s, "committed_s": committed_s}
        answer["arrived_s"] = time.perf_counter() - began
        status = read_status(self._ck.root)
        before, self._sent = self._sent, 0 if status is None else status.levels[0].bytes_all
        answer["sent_bytes"] = self._sent - before
        return {**answer, "digest": workloads.digest(self._state)}

    def _private(self) -> list[str]:
        return [*self._state]

    def train_on(self, model: dict[str, Any]) -> Answer:
        """On the first node; others have next to nothing to save.

        All nodes are one machine here, and it is to have the work of one, which sends what it has and
        receives as much.
        """
        if self._rank == 0:
            return super().train_on(model)
        self._state = workloads.large_state(state_bytes=_LEAST_BYTES, leaves=_LEAST_LEAVES)
        return {}

    def beside(self, pairs: int, steps: int, others: Sequence[int]) -> Answer:
        """As for one root, on the first node; others only save. All but its trainer is on `others`."""
        every = sorted(os.sched_getaffinity(0))
        if others:
            pin(others if self._rank else [cpu for cpu in every if cpu not in others])
        try:
            return super().beside(pairs, steps, others)
        finally:
            pin(every)

    def _window(self, agent: psutil.Process, steps: int, *, held: bool) -> tuple[float, float]:
        # Order matters: no agent is held while another node still waits for what it sends there.
        dist.barrier()
        return super()._window(agent, steps, held=held)

    def _timed(self, steps: int) -> tuple[float, float]:
        took_s = (1.0, 1.0) if self._rank else super()._timed(steps)
        dist.barrier()  # what agents are, held or not, they are on all nodes until then
        return took_s

    def copy(self, into: str, tools: Sequence[str]) -> Answer:
        """What this node has of the newest step, by each tool; None: it is not installed."""
        assert self._ck is not None
        step = step_path(self._ck.root, self._step)
        if self._rank:
            return {}  # while it copies, nobody else does anything
        return {"seconds": {tool: copy_seconds(tool, step, Path(into)) for tool in tools}}

    def lose(self, home: str, rank: int) -> Answer:
        """The end of the trainer's part on all nodes; of one also that of its agent and its disk."""
        agent = self._closed()
        if self._rank == rank:
            end(agent, _WAIT_S)
            shutil.rmtree(Path(home) / f"node-{rank}")
        return {}

    def leave(self) -> Answer:
        """Close the Checkpointer, and end its agent: it would wait for other nodes."""
        end(self._closed(), _WAIT_S)
        return {}

    def drop(self) -> Answer:
        """At the end of the team."""
        self.leave()
        dist.destroy_process_group()
        return {}

    def _closed(self) -> psutil.Process | None:
        """Close the Checkpointer, if there is one; its agent, which goes on."""
        ck, self._ck = self._ck, None
        if ck is None:
            return None
        ck.close()
        return agent_of(ck.root)


class LmWorker(Member):
    """A rank whose copies lm-resiliency takes into the memory of the next one."""

    def hello(self) -> Answer:
        """Which release, or that it is missing."""
        try:
            return {"version": f"lm-resiliency {metadata.version('lm-resiliency')}"}
        except metadata.PackageNotFoundError:
            return {"reason": "lm-resiliency is not installed"}

    def build(self, state_bytes: int, leaves: int) -> Answer:
        """As many bytes as each node has."""
        torch.set_num_threads(1)
        found: State = workloads.large_state(state_bytes=state_bytes, leaves=leaves)
        self._tensors, self._step = [*found.values()], 0
        return {"state_bytes": sum(leaf.nbytes for leaf in self._tensors)}

    def meet(self, home: str, shape: str) -> Answer:
        """Its manager, with the next rank as the one that keeps copies."""
        lm = import_module("lm_resiliency.checkpointing")
        folder = str(Path(home) / f"lm-{self._rank}")
        config = lm.InMemoryCkptConfig(
            replication_jump=1, disk_flush_interval=0, disk_folder=folder
        )
        self._manager = lm.InMemoryCheckpointManager(config)
        return {}

    def save_and_reach(self) -> Answer:
        """Until the copies are in memory over there; committed is what it calls so."""
        self._step += 1
        dist.barrier()
        began = time.perf_counter()
        self._manager.save_tensors(self._tensors, self._step)
        answer = {"call_s": time.perf_counter() - began}
        self._manager.maybe_wait()
        answer["committed_s"] = time.perf_counter() - began
        assert self._manager.finalize_replication(timeout_s=_WAIT_S)
        return {**answer, "arrived_s": time.perf_counter() - began}

    def drop(self) -> Answer:
        """At the end of the team."""
        return {}
