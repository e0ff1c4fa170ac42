"""A training job on late devices, and what becomes of its checkpoints."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt_core
from ckpt_core import Checkpointer, CkptError, Options
from ckpt_core.restore import filling, sending
from ckpt_core.system.files import Files
from tests.devices.late_devices import LateDevices

SMALL = {"chunk_bytes": "16KiB", "staging_bytes": "256KiB", "eager_leaf_bytes": "1KiB"}
"""Leaves of many chunks, and memory that is used again many times in one save."""

_WAIT_S = 60


class Job:
    """Tensors on two devices and on the host. `forward` changes what `save` must copy, `update` the rest.

    All of it changes through queued work alone; the host's leaves lie between those of the devices, so that
    whatever lands late in staging memory lands in bytes that nobody else will set right.
    """

    def __init__(self, devices: LateDevices, *, homes: tuple[int, ...] = (0, 1)) -> None:
        self.devices = devices
        torch.manual_seed(1)
        self.early: dict[str, Tensor] = {}
        self.late: dict[str, Tensor] = {}
        self.homes: dict[str, int] = {}
        for round_ in range(3):
            for index in homes:
                self._add(self.early, f"norm{round_}.{index}", torch.randn(64), index)
                self._add(self.late, f"weight{round_}.{index}", torch.randn(9_000), index)
            self.early[f"count{round_}"] = torch.randn(100)
            self.late[f"host{round_}"] = torch.randn(7_000)
        first = homes[0]
        self._add(self.late, "strided", torch.randn(60, 90).t(), first)
        self._add(self.early, "row", torch.randn(40, 8)[:, 3], first)
        # A buffer is copied inside `save`, whatever its size.
        self.module = nn.Module()
        statistics = torch.randn(20_000)
        self.module.register_buffer("statistics", statistics)
        self._add(self.early, "module.statistics", statistics, homes[-1])

    def _add(self, group: dict[str, Tensor], name: str, tensor: Tensor, index: int) -> None:
        group[name] = self.devices.place(tensor, index)
        self.homes[name] = index

    def state(self) -> dict[str, Any]:
        tensors = {**self.early, **self.late}
        tensors.pop("module.statistics")
        return {**dict(sorted(tensors.items())), "module": self.module}

    def forward(self) -> None:
        self._change(self.early)

    def update(self) -> None:
        self._change(self.late)

    def expected(self) -> dict[str, Tensor]:
        """Takes, behind what is queued, the bytes that the state has then; whole after a `drain`."""
        found: dict[str, Tensor] = {}
        for name, tensor in {**self.early, **self.late}.items():
            self._do(name, lambda name=name, tensor=tensor: found.update({name: tensor.clone()}))
        return found

    def _change(self, group: Mapping[str, Tensor]) -> None:
        for name, tensor in group.items():
            self._do(name, lambda tensor=tensor: tensor.mul_(1.01).add_(0.25))

    def _do(self, name: str, do: Callable[[], Any]) -> None:
        if name in self.homes:
            self.devices.run(self.homes[name], do)
        else:
            do()


def is_whole(root: Path, step: int, expected: Mapping[str, Tensor]) -> bool:
    """Whether a step holds the bits that the state had."""
    tree = ckpt_core.load(root / f"step-{step:012d}")
    found = {**tree, "module.statistics": tree["module"]["statistics"]}
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def train(root: Path, devices: LateDevices, *, mode: str = "host", **more: Any) -> None:
    """Save every step of a job beside its training; all of them must be whole."""
    job = Job(devices, homes=more.pop("homes", (0, 1)))
    options = Options(**({"mode": mode, "keep_last": None, **SMALL} | more))
    expected = {}
    with Checkpointer(root, options, devices=devices) as ck:
        for step in range(5):
            job.forward()
            ck.wait_staged()
            job.update()
            expected[step] = job.expected()
            ck.save(step, job.state())
        job.forward()
        ck.wait_staged()
        job.update()
        ck.wait()
    devices.drain()
    torn = [step for step, tensors in expected.items() if not is_whole(root, step, tensors)]
    assert not torn, f"torn steps: {torn}"
    assert not devices.failures


class Unwritable(Files):
    """A disk that takes nothing while `broken`; it sees files that are closed while copies run into them."""

    broken = False

    def __init__(self, devices: LateDevices) -> None:
        self._devices = devices
        self._mapped: dict[int, tuple[int, int]] = {}

    def pwrite(self, fd: int, data: memoryview, offset: int) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
        super().pwrite(fd, data, offset)

    def map_shared(self, fd: int, size: int) -> mmap.mmap:
        made = super().map_shared(fd, size)
        start = torch.frombuffer(made, dtype=torch.uint8).data_ptr()
        self._mapped[fd] = (start, start + size)
        return made

    def close(self, fd: int) -> None:
        if self._devices.copies_into(*self._mapped.pop(fd, (0, 0))):
            self._devices.failures.append("a file was closed while copies into it were queued")
        super().close(fd)


def train_with_failures(root: Path, devices: LateDevices, *, mode: str = "host") -> None:
    """Every second save fails while its copies are under way; the others must be whole."""
    job, files = Job(devices), Unwritable(devices)
    other = {"a": torch.randn(11_000), "b": devices.place(torch.randn(5_000), 0)}
    options = Options(mode=mode, keep_last=None, on_error="warn", **SMALL)
    expected = {}
    with Checkpointer(root, options, files=files, devices=devices) as ck:
        for step in range(6):
            job.forward()
            ck.wait_staged()
            job.update()
            files.broken = step % 2 == 0
            expected[step] = job.expected()
            handle = ck.save(step, job.state())
            error = handle.committed.exception(_WAIT_S)
            assert isinstance(error, CkptError) == files.broken, error
            # Of another form: other leaves lie where those of the failed save would have gone.
            ck.wait_staged()
            files.broken = False
            ck.save(100 + step, other).committed.result(_WAIT_S)
            tree = ckpt_core.load(root / f"step-{100 + step:012d}")
            devices.drain()
            assert all(torch.equal(tree[name], other[name]) for name in other), f"step {step}"
    assert all(is_whole(root, step, expected[step]) for step in (1, 3, 5))
    assert not devices.failures


def train_layer_by_layer(root: Path, devices: LateDevices) -> None:
    """Stage each tensor as it becomes final, and seal with the rest."""
    job = Job(devices)
    expected = {}
    with Checkpointer(root, Options(keep_last=None, **SMALL), devices=devices) as ck:
        for step in range(4):
            save = ck.begin(step, job.late)
            job.forward()
            expected[step] = job.expected()
            for name in reversed(list(job.late)):
                save.stage([name])
            save.seal(job.state())
            job.forward()
            ck.wait_staged()
            job.update()
        ck.wait()
    devices.drain()
    torn = [step for step, tensors in expected.items() if not is_whole(root, step, tensors)]
    assert not torn, f"torn steps: {torn}"


def save_named_files(root: Path, devices: LateDevices) -> None:
    """Directories of files that `torch.load` reads."""
    job = Job(devices)
    expected = {}
    with Checkpointer(root, Options(**SMALL), devices=devices) as ck:
        for step in range(4):
            job.forward()
            ck.wait_staged()
            job.update()
            expected[step] = job.expected()
            save = ck.begin_files(step, f"tag{step}")
            save.add("early", job.early, eager=True)
            save.add("late", job.late)
            save.seal()
        job.forward()
        ck.wait_staged()
        job.update()
        ck.wait()
    devices.drain()
    for step, tensors in expected.items():
        found = torch.load(root / f"tag{step}" / "early") | torch.load(root / f"tag{step}" / "late")
        torn = [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)]
        assert not torn, f"tag{step}: {torn}"


def restore_in_place(root: Path, devices: LateDevices) -> None:
    """Take a step back while training still has work queued, on streams of its own."""
    for index in range(2):
        devices.own_stream(index)
    job = Job(devices)
    places = [tensor.data_ptr() for tensor in job.late.values()]
    with Checkpointer(root, Options(**SMALL), devices=devices) as ck:
        job.update()
        expected = job.expected()
        ck.save(1, job.state())
        ck.wait()
        job.forward()
        job.update()
        assert ck.restore(job.state()) is not None
        after = job.expected()
    devices.drain()
    torn = [name for name, tensor in expected.items() if not torch.equal(after[name], tensor)]
    assert not torn, f"not restored: {torn}"
    assert [tensor.data_ptr() for tensor in job.late.values()] == places


def restore_through_small_buffers(root: Path, devices: LateDevices) -> None:
    """The same, with buffers that are used again many times and copies of one leaf and of many."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(filling, "SLOT_BYTES", 8192)
        patched.setattr(sending, "SMALL_BYTES", 4096)
        restore_in_place(root, devices)


class Loading:
    """Takes what is loaded in work that it queues, as a module on a device does."""

    def __init__(self, devices: LateDevices) -> None:
        self.devices, self.value = devices, devices.place(torch.zeros(5_000), 0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.devices.run(0, lambda: self.value.copy_(state["value"]))


def restore_into_what_loads(root: Path, devices: LateDevices) -> None:
    """Once a restore returns, any stream finds what was loaded."""
    live = Loading(devices)
    live.value.fill_(7)
    with Checkpointer(root, devices=devices) as ck:
        ck.save(1, {"live": live}).committed.result(_WAIT_S)
        devices.drain()
        live.value.zero_()
        assert ck.restore({"live": live}) is not None
        assert live.value.eq(7).all()
