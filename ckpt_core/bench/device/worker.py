"""The processes of the suite `device`.

`CopyWorker` serves all ways of copying, one after another, since they share leaves and the raw copies beside
them: hello -> check; first; open -> save, read -> drop. `TrainWorker` is one contender that trains:
hello -> start -> train -> restore. Requests name the way, as those of a shared team do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt_core.bench import workloads
from ckpt_core.bench.contenders import OURS, Contender, Handle, Profile, State
from ckpt_core.bench.device.accelerator import Accelerator, Raw
from ckpt_core.bench.device.bits import wrong_steps
from ckpt_core.bench.device.training import DeviceTraining, window
from ckpt_core.bench.device.ways import REGISTRY, Host, way_class
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.worker import StateWorker
from ckpt_core.errors import ConfigError

_READERS = 8
_BLOCK_BYTES = 16 * 2**20
_IDLE_READS = 2000
_SETTLING_STEPS = 3


class _OnDevice:
    """What both workers know."""

    def __init__(self, name: str, root: Path) -> None:
        super().__init__()
        self._name = name
        self._root = root
        self._accelerator: Accelerator | None = None

    def hello(self, name: str, device: str | None) -> Answer:
        """Whether the way can run on that device; it is the one of all later requests."""
        way = way_class(name)
        try:
            self._accelerator = Accelerator(device)
        except ConfigError as exc:
            return {"reason": str(exc)}
        reason = way.available(self._root)
        version = way.version() if reason is None else ""
        device = self._accelerator.title
        known = {"title": way.title, "fsyncs": way.fsyncs, "version": version}
        return {"reason": reason, "device": device, **known}

    @property
    def _on(self) -> Accelerator:
        assert self._accelerator is not None, "hello comes first"
        return self._accelerator

    def _profile(self, folder: str, staging_bytes: int, timeout_s: float) -> Profile:
        root = self._root / folder
        root.mkdir()
        return Profile(root, staging_bytes, timeout_s)


class CopyWorker(_OnDevice):
    """Leaves of one size, the raw copies of them, and this engine in one mode."""

    def __init__(self, name: str, root: Path) -> None:
        super().__init__(name, root)
        self._state: State = {}
        self._raw: Raw | None = None
        self._way: Host | None = None
        self._step = 0

    def check(self, name: str, device: str | None, leaf_bytes: int, steps: int) -> Answer:
        """See `bits`."""
        self._accelerator = Accelerator(device)
        folder = self._root / f"bits-{name}"
        mode = _ours(name).mode
        wrong = wrong_steps(folder, self._on, mode=mode, leaf_bytes=leaf_bytes, steps=steps)
        shutil.rmtree(folder)
        return {"wrong": wrong}

    def open(self, name: str, *, prepare: bool, warmups: int, **asked: Any) -> Answer:
        """Leaves, staging memory and files as they are in a training that runs for long."""
        way = self._build(name, **asked)
        began = time.perf_counter()
        if prepare:
            way.prepare(self._state)
        prepare_s = time.perf_counter() - began
        calls = [self._save()["call_s"] for _ in range(warmups)]
        about = {"settings": way.settings, "state_bytes": self._copies.nbytes}
        return {"prepare_s": prepare_s, "first_s": calls[0], **about}

    def _build(
        self,
        name: str,
        *,
        device: str | None,
        leaves: int,
        leaf_bytes: int,
        staging_bytes: int,
        timeout_s: float,
    ) -> Host:
        self._accelerator = self._accelerator or Accelerator(device)
        first = next(iter(self._state.values()), None)
        if first is None or (len(self._state), first.nbytes) != (leaves, leaf_bytes):
            self._raw, self._state = None, {}
            self._on.tidy()
            shape = (leaf_bytes // 4,)
            self._state = {
                f"leaf{n:06d}": torch.rand(shape, device=self._on.device) for n in range(leaves)
            }
            self._raw = Raw(self._on, list(self._state.values()))
        self._way = _ours(name)(self._profile(f"{name}-{leaf_bytes}", staging_bytes, timeout_s))
        return self._way

    def save(self, name: str) -> Answer:
        """The raw copies, and a save."""
        raw, on = self._copies, self._on
        own = (raw.to_host, raw.pieces) if _is_host(name) else (raw.within,)
        return {"raw_s": [on.seconds(copy) for copy in own], **self._save()}

    def _save(self) -> Answer:
        way = self._way
        assert way is not None, "open comes first"
        self._step += 1
        workloads.mark(self._state, self._step)
        gc.collect()
        self._on.drain()
        began = time.perf_counter()
        save = way.save(self._state, self._step)
        called = time.perf_counter()
        save.barrier()
        returned = time.perf_counter()
        self._on.pass_stream()
        passed = time.perf_counter()
        save.wait_staged()
        staged = time.perf_counter()
        save.wait_durable()
        ends = {"call": called, "barrier": returned, "passed": passed, "staged": staged}
        return {f"{name}_s": end - began for name, end in ends.items()}

    def read(self, name: str) -> Answer:
        """A read of training's own: beside nothing, beside raw copies in one go, beside a save."""
        way = self._way
        assert way is not None, "open comes first"
        own = torch.zeros(1, device=self._on.device)
        self._on.drain()
        idle = iter(range(_IDLE_READS))
        beside_none = _reads(own, lambda: next(idle, None) is None)
        beside_raw = _reads(own, self._on.beside(self._copies.to_host))
        self._on.drain()
        self._step += 1
        save = way.save(self._state, self._step)
        # A clone is staged at once, and copied to the host behind that.
        end = save.handle.staged if _is_host(name) else save.handle.committed
        beside_save = _reads(own, end.done)
        save.wait_durable()
        return {"none": beside_none, "raw": beside_raw, "save": beside_save}

    def drop(self, name: str) -> Answer:
        """Close the engine and remove what it wrote; leaves stay."""
        way, self._way = self._way, None
        if way is not None:
            way.close()
        for folder in self._root.iterdir():
            shutil.rmtree(folder)
        self._on.tidy()
        return {}

    def close(self) -> None:
        """End of the process."""
        if self._accelerator is not None:
            self.drop("")

    @property
    def _copies(self) -> Raw:
        assert self._raw is not None, "open comes first"
        return self._raw


class TrainWorker(_OnDevice, StateWorker):
    """One contender beside a training."""

    def __init__(self, name: str, root: Path) -> None:
        super().__init__(name, root)
        self._contender: Contender | None = None
        self._step = 0

    def start(
        self,
        *,
        model: dict[str, Any],
        parts: int,
        staging_bytes: int,
        timeout_s: float,
        warmups: int,
    ) -> Answer:
        """Build the model, and save until all memory and files are warm: times with nothing beside it."""
        self._training = DeviceTraining.on(self._on, model, parts)
        self._state = self._training.state()
        size = sum(tensor.nbytes for tensor in self._state.values())
        self._contender = way_class(self._name)(self._profile("files", staging_bytes, timeout_s))
        if isinstance(self._contender, Host):
            self._contender.prepare(self._state)
        saves = []
        for _ in range(warmups):
            self._step += 1
            saves.append(self._time_save(self._contender, self._step))
            self._contender.tidy()
        about = {"state_bytes": size, "leaves": len(self._state)}
        return {"saves": saves, "settings": self._contender.settings, **about}

    def train(self, every: int, steps: int, base: int) -> Answer:
        """Without saves, with them, and without again."""
        assert self._training is not None, "start comes first"
        run = partial(window, self._training, self._on, self._save)
        run(every=0, steps=_SETTLING_STEPS)
        before = run(every=0, steps=base)
        saving = dataclasses.asdict(run(every=every, steps=steps))
        after = run(every=0, steps=base)
        return {"base_s": [*before.step_s, *after.step_s], **saving}

    def _save(self) -> Handle:
        contender = self._open
        self._step += 1
        handle = contender.save(self._state, self._step)
        # Peers leave older steps behind: nobody's training is to wait until these are removed.
        threading.Thread(target=contender.tidy).start()
        return handle

    def restore(self, rounds: int) -> Answer:
        """Into the live tensors, beside what the link and the files give."""
        assert self._training is not None
        self._training.optimizer.zero_grad()
        self._on.tidy()
        self._save().wait_durable()
        saved = {key: tensor.clone() for key, tensor in self._state.items()}
        _read_rate(self._root)  # from now on the page cache has all of it
        raw = Raw(self._on, list(self._state.values())) if self._name == OURS else None
        turns = [self._restore(raw) for _ in range(rounds)]
        equal = all(torch.equal(saved[key], tensor) for key, tensor in self._state.items())
        return {"turns": turns, "equal": equal}

    def _restore(self, raw: Raw | None) -> Answer:
        links: dict[str, float] = {}
        if raw is not None:
            links = {"raw": raw.nbytes / self._on.seconds(raw.from_host)}
            links["plain"] = _read_rate(self._root)
        workloads.scramble(self._state)
        seconds = self._on.seconds(lambda: self._open.load_into(self._state))
        return {"restore": sum(leaf.nbytes for leaf in self._state.values()) / seconds, **links}

    @property
    def _open(self) -> Contender:
        assert self._contender is not None, "start comes first"
        return self._contender

    def close(self) -> None:
        """End of the process."""
        if self._contender is not None:
            self._contender.close()


def _ours(name: str) -> type[Host]:
    way = REGISTRY[name]
    assert way is not None, "only this engine is looked at so closely"
    return way


def _is_host(name: str) -> bool:
    return _ours(name).mode == Host.mode


def _reads(own: torch.Tensor, end: Callable[[], bool]) -> dict[str, float]:
    """Seconds of one read after the other, until the end; at least one."""
    found: list[float] = []
    while not found or not end():
        began = time.perf_counter()
        own.item()
        found.append(time.perf_counter() - began)
    found.sort()
    percent = (len(found) - 1) / 100
    return {"p50": found[int(50 * percent)], "p99": found[int(99 * percent)], "max": found[-1]}


def _read_rate(folder: Path) -> float:
    """Bytes/s of plain reads of all files, by as many threads as the engine has readers."""
    with contextlib.ExitStack() as opened:
        blocks = []
        for path in filter(Path.is_file, folder.rglob("*")):
            # An older step may be on its way out.
            with contextlib.suppress(FileNotFoundError):
                file = opened.enter_context(path.open("rb", buffering=0))
                size = os.fstat(file.fileno()).st_size
                blocks += [(file.fileno(), begin) for begin in range(0, size, _BLOCK_BYTES)]
        memory = [bytearray(_BLOCK_BYTES) for _ in range(_READERS)]
        with ThreadPoolExecutor(_READERS) as pool:
            began = time.perf_counter()
            parts = [(blocks[n::_READERS], memory[n]) for n in range(_READERS)]
            total = sum(pool.map(lambda part: _read(*part), parts))
            return total / (time.perf_counter() - began)


def _read(blocks: list[tuple[int, int]], memory: bytearray) -> int:
    return sum(os.preadv(fd, [memory], begin) for fd, begin in blocks)
