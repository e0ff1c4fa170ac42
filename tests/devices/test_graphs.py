"""Graphs: nothing of a save is captured, and what a replay has made is saved bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckpt_core
from ckpt_core import Checkpointer, ConfigError, Options
from ckpt_core.errors import StagingError
from ckpt_core.snapshot import pool
from tests.devices.late_devices import LateDevices

OPTIONS = Options(chunk_bytes="64KiB", staging_bytes="1MiB", eager_leaf_bytes=0, keep_last=None)

# CUDA's own context may come with the first product of a thread, which warns.
quietly = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")


class Capturing(LateDevices):
    """Late devices that say that a graph is being captured."""

    captures = False

    def is_capturing(self) -> bool:
        return self.captures


def test_what_would_be_captured_is_refused_and_training_goes_on(root: Path) -> None:
    devices = Capturing()
    weight = devices.place(torch.nn.Parameter(torch.zeros(300_000)), 0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with Checkpointer(root, OPTIONS, devices=devices) as ck:
        devices.captures = True
        optimizer.step()  # nothing is under way
        with pytest.raises(ConfigError, match="a graph is being captured"):
            ck.save(1, {"weight": weight})
        devices.captures = False
        ck.save(2, {"weight": weight})
        devices.captures = True
        with pytest.raises(ConfigError, match="Call wait\\(\\) before a capture"):
            optimizer.step()
        with pytest.raises(ConfigError, match="wait_staged\\(\\) before each replay"):
            ck.wait_staged()
        devices.captures = False
        ck.wait()
        optimizer.step()
    devices.drain()
    assert ckpt_core.committed_steps(root) == (2,)
    assert torch.equal(ckpt_core.load(root)["weight"], torch.full((300_000,), -1.0))


class Locking(Capturing):
    """The same, whose memory is page-locked bit by bit, once they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.locked = 0

    def ask_to_lock(self, address: int, nbytes: int, device: torch.device) -> int | None:
        assert self.let.wait(60)
        time.sleep(0.002)
        self.locked += nbytes
        return super().ask_to_lock(address, nbytes, device)


@pytest.fixture
def locking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locking]:
    monkeypatch.setattr(pool, "_SEGMENT_BYTES", 64 * 1024)
    devices = Locking()
    yield devices
    devices.let.set()


def test_after_wait_no_memory_is_page_locked_any_more(root: Path, locking: Locking) -> None:
    locking.let.set()
    state = {"weight": locking.place(torch.zeros(300_000), 0)}
    with Checkpointer(root, OPTIONS, devices=locking) as ck:
        ck.prepare(state)
        ck.wait()
        locked = locking.locked
        # All that the save then needs.
        ck.save(1, state)
        ck.wait()
        assert locked == locking.locked > 0


def test_a_capture_beside_page_locking_is_refused_and_so_is_prepare(
    root: Path, locking: Locking
) -> None:
    weight = locking.place(torch.nn.Parameter(torch.zeros(300_000)), 0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with Checkpointer(root, OPTIONS, devices=locking) as ck:
        locking.captures = True
        with pytest.raises(ConfigError, match="a graph is being captured"):
            ck.prepare({"weight": weight})
        locking.captures = False
        ck.prepare({"weight": weight})
        locking.captures = True
        for call in (optimizer.step, ck.wait_staged):
            with pytest.raises(ConfigError, match="Call wait\\(\\) before a capture"):
                call()
        locking.let.set()
        ck.wait()
        optimizer.step()
        ck.wait_staged()
    assert bool((weight == -1).all())


def test_page_locking_that_hangs_ends_a_wait_and_a_closed_checkpointer_has_none(
    root: Path, locking: Locking
) -> None:
    state = {"weight": locking.place(torch.zeros(300_000), 0)}
    options = replace(OPTIONS, timeout=0.5)
    with Checkpointer(root, options, devices=locking) as ck:
        ck.prepare(state)
        with pytest.raises(StagingError, match="page-locked behind `prepare`"):
            ck.wait()
        locking.let.set()
    ck.wait()


class Captured:
    """A training step as one graph: forward, backward and a capturable AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=True)
        self.inputs = torch.randn(64, 256, device="cuda")
        self.graph = torch.cuda.CUDAGraph()

    def warm_up(self) -> None:
        """Some steps as they are, on a stream beside, as capturing wants it."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(beside)

    def capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.step(zero=False)

    def step(self, *, zero: bool = True) -> None:
        if zero:
            self.optimizer.zero_grad(set_to_none=True)
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def replay(self, ck: Checkpointer, step: int) -> None:
        self.inputs.copy_(torch.full((64, 256), 0.1 * step))
        ck.wait_staged()  # a replay calls no hook
        self.graph.replay()

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def copies(self) -> dict[str, Tensor]:
        slots = self.optimizer.state_dict()["state"]
        moments = {f"{key}.{name}": value for key in slots for name, value in slots[key].items()}
        tensors = dict(self.model.state_dict()) | moments
        return {name: value.detach().cpu().clone() for name, value in tensors.items()}


def loaded(path: Path) -> dict[str, Tensor]:
    tree = ckpt_core.load(path)
    slots = tree["optimizer"]["state"]
    return dict(tree["model"]) | {
        f"{key}.{name}": value for key in slots for name, value in slots[key].items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name].cpu(), expected[name])]
    assert different == []


@quietly
@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["host", "device"])
def test_steps_that_a_graph_replays_are_saved_and_restored_to_the_same_bits(
    root: Path, mode: str
) -> None:
    run, copies = Captured(), {}
    options = Options(mode=mode, keep_last=None, chunk_bytes="256KiB", staging_bytes="4MiB")
    with Checkpointer(root, options) as ck:
        run.warm_up()
        ck.save(0, run.state())
        ck.wait()
        run.capture()
        for step in range(1, 7):
            run.replay(ck, step)
            copies[step] = run.copies()
            ck.save(step, run.state())
        run.replay(ck, 7)
        ck.wait()
        expected = run.copies()
        # In place: the graph goes on with the memory that it was captured with.
        assert ck.restore(run.state(), step=6) is not None
        assert_same(run.copies(), copies[6])
        run.replay(ck, 7)
        assert_same(run.copies(), expected)
    for step, copy in copies.items():
        assert_same(loaded(root / f"step-{step:012d}"), copy)


@quietly
@pytest.mark.cuda
def test_a_capture_beside_a_save_is_refused(root: Path) -> None:
    run = Captured()
    large = torch.ones(256 * 2**20, device="cuda")
    # The engine's threads ask the driver for things that another way of capturing forbids to all threads.
    capture = torch.cuda.graph(run.graph, capture_error_mode="thread_local")
    with Checkpointer(root, Options(mode="host", staging_bytes="16MiB")) as ck:
        run.warm_up()
        ck.save(1, {**run.state(), "large": large})
        with capture:
            run.inputs.add_(1)
            with pytest.raises(ConfigError, match="Call wait"):
                run.optimizer.step()
        ck.wait()
    assert torch.equal(ckpt_core.load(root)["large"], large.cpu())
