"""The process of one way: this engine with or without a level, or another way to a store. Needs torch."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch

from ckpt_core.anywhere import load
from ckpt_core.bench import workloads
from ckpt_core.bench.contenders import State
from ckpt_core.bench.levels.client import release
from ckpt_core.bench.serving import Answer
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.levels import read_status
from ckpt_core.options import Level, Options

_END_S = 60.0


class Worker:
    """Answers `ckpt_core.bench.levels.suite`."""

    def __init__(self, name: str, root: Path) -> None:
        self._name, self._root = name, root
        self._state: State = {}
        self._training: workloads.Training | None = None
        self._ck: Checkpointer | None = None
        self._step = 0

    def hello(self) -> Answer:
        """What is missing, or which release it is."""
        return release(self._name)

    def build(self, state_bytes: int, leaves: int) -> Answer:
        """The state to save."""
        self._training = None
        self._state = workloads.large_state(state_bytes=state_bytes, leaves=leaves)
        return {"state_bytes": sum(leaf.nbytes for leaf in self._state.values())}

    def train_on(self, model: dict[str, Any]) -> Answer:
        """A model whose state is saved from now on."""
        torch.set_num_threads(1)
        self._training = workloads.Training.start(model)
        self._state = self._training.state()
        return {}

    # -- this engine -----------------------------------------------------------------------------

    def open(self, folder: str, url: str | None, bandwidth: int | None, keep: int) -> Answer:
        """A Checkpointer, whose agent takes every step to `url` if there is one."""
        levels = [] if url is None else [Level(url, keep_last=1, bandwidth=bandwidth)]
        self._ck = Checkpointer(folder, Options(keep_last=keep, levels=levels))
        return {}

    def save(self) -> Answer:
        """One save, and until it is committed; the barrier apart."""
        assert self._ck is not None
        self._step += 1
        workloads.mark(self._state, self._step)
        began = time.perf_counter()
        handle = self._ck.save(self._step, self._state, per_rank=self._private())
        call_s = time.perf_counter() - began
        handle.committed.result()
        return {"call_s": call_s, "committed_s": time.perf_counter() - began}

    def _private(self) -> list[str]:
        """What no other rank has."""
        return []

    def reach(self) -> Answer:
        """Wait until all that is due has come to the level; what its agent has done since it began."""
        assert self._ck is not None
        self._ck.wait(level=1)
        status = read_status(self._ck.root)
        assert status is not None
        agent = psutil.Process(status.pid).cpu_times()
        level = status.levels[0]
        return {
            "bytes": level.bytes_all,
            "busy_s": level.busy_s,
            "cpu_s": agent.user + agent.system,
        }

    def train(self, steps: int, every: int, cpu: int | None) -> Answer:
        """Steps with a save after each `every`-th; training and this engine's threads keep to `cpu`."""
        assert self._ck is not None and self._training is not None
        if cpu is not None:
            pin([cpu])
        began = time.perf_counter()
        for number in range(1, steps + 1):
            self._training.step(self._ck.wait_staged)
            if number % every == 0:
                self._step += 1
                self._ck.save(self._step, self._state)
        took_s = time.perf_counter() - began
        self._ck.wait()
        return {"step_s": took_s / steps}

    def beside(self, pairs: int, steps: int, others: Sequence[int]) -> Answer:
        """Training behind a save, in pairs: while the agent sends it, over the same while it is held.

        Args:
            others: processors for the agent.
        """
        assert self._ck is not None
        status = read_status(self._ck.root)
        assert status is not None
        agent = psutil.Process(status.pid)
        for thread in agent.threads() if others else ():
            os.sched_setaffinity(thread.id, others)
        slower, clock = [], []
        for _ in range(pairs):
            took_s = {held: self._window(agent, steps, held=held) for held in _either_first()}
            slower.append(took_s[False][0] / took_s[True][0] - 1)
            clock.append(took_s[False][1] / took_s[True][1] - 1)
        return {"slower": slower, "clock": clock}

    def _window(self, agent: psutil.Process, steps: int, *, held: bool) -> tuple[float, float]:
        assert self._ck is not None
        agent.suspend()
        try:
            self.save()
            if not held:
                agent.resume()
            return self._timed(steps)
        finally:
            agent.resume()
            self._ck.wait(level=1)

    def _timed(self, steps: int) -> tuple[float, float]:
        """Seconds of this thread alone, which trains: what else this machine does is not in them; and all."""
        assert self._ck is not None and self._training is not None
        cpu_s, began = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            self._training.step(self._ck.wait_staged)
        return time.thread_time() - cpu_s, time.perf_counter() - began

    def restore(self) -> Answer:
        """The newest step into the state, destroyed before; digests of before and after."""
        assert self._ck is not None
        saved = workloads.digest(self._state)
        workloads.scramble(self._state)
        began = time.perf_counter()
        self._ck.restore(self._state)
        took_s = time.perf_counter() - began
        return {"seconds": took_s, "saved": saved, "restored": workloads.digest(self._state)}

    def load(self, url: str) -> Answer:
        """The newest step at a store straight into fresh tensors; digests as of `restore`.

        Once before the clock runs: the memory of that is used again, as the client alone has such memory.
        """
        saved = workloads.digest(self._state)
        load(url, progress=False)
        began = time.perf_counter()
        found = load(url, progress=False)
        took_s = time.perf_counter() - began
        return {"seconds": took_s, "saved": saved, "restored": workloads.digest(found)}

    def leave(self) -> Answer:
        """Close the Checkpointer; returns when its agent has ended too."""
        ck, self._ck = self._ck, None
        if ck is not None:
            ck.close()
            status, deadline = read_status(ck.root), time.monotonic() + _END_S
            while status and not _has_ended(status.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            shutil.rmtree(ck.root, ignore_errors=True)
        return {}

    def close(self) -> None:
        """At the end of the process."""
        self.leave()

    # -- other ways ------------------------------------------------------------------------------

    def upload(self, url: str, source: str) -> Answer:
        """The state itself to a store; what it took of this process."""
        put = self._put_s3fs if self._name == "torch_save_s3fs" else self._put_dcp
        began, cpu_s = time.perf_counter(), time.process_time()
        put(url)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}

    def memcpy(self) -> Answer:
        """Copy each leaf to warm memory with one thread, as the stager does."""
        if not hasattr(self, "_copies"):
            self._copies = {name: leaf.clone() for name, leaf in self._state.items()}
        began = time.perf_counter()
        for name, leaf in self._state.items():
            ctypes.memmove(self._copies[name].data_ptr(), leaf.data_ptr(), leaf.nbytes)
        return {"seconds": time.perf_counter() - began}

    def _put_s3fs(self, url: str) -> None:
        files = import_module("s3fs").S3FileSystem(
            endpoint_url=os.environ["AWS_ENDPOINT_URL"], skip_instance_cache=True
        )
        with files.open(f"{url}/state.pt", "wb") as file:
            torch.save(self._state, file)

    def _put_dcp(self, url: str) -> None:
        writer = import_module("s3torchconnector.dcp").S3StorageWriter(
            region=os.environ["AWS_REGION"], path=url
        )
        save = import_module("torch.distributed.checkpoint").save
        save(self._state, storage_writer=writer, no_dist=True)


def _has_ended(pid: int) -> bool:
    try:
        # A child of this process that nobody has waited for.
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _either_first() -> list[bool]:
    return random.sample((False, True), 2)


def pin(cpus: Sequence[int]) -> None:
    """Keep all threads of this process to some processors."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cpus)
