"""The promises of a save with the state of a real model on a device: late ones, and CUDA where it is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import BarrierError, Checkpointer, Options, RngState
from ckpt_core.layout.dtypes import STORAGE
from tests.devices.late_devices import PACES, LateDevices, LateEvent
from tests.devices.machines import CUDA, Machine, OnLate, machine_of

MODES = ["host", "device", "auto"]


@pytest.fixture(params=[*PACES, CUDA])
def machine(request: pytest.FixtureRequest) -> Machine:
    return machine_of(request.param)


class Training:
    """A model with buffers and moments, all of it on the device."""

    def __init__(self, machine: Machine) -> None:
        torch.manual_seed(0)
        self.machine = machine
        self.model = machine.put(
            torch.nn.Sequential(
                torch.nn.Linear(128, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 128)
            )
        )
        fused = machine.name == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)
        self._forward()
        self.optimizer.step()
        if isinstance(machine, OnLate):
            machine.put(self.optimizer)

    def step(self, ck: Checkpointer) -> None:
        self.machine.run(self._forward)
        if isinstance(self.machine, OnLate):
            # The late device makes the update, on a thread of its own: the barrier is where it is queued.
            ck.leave_barrier_to_owner(self.optimizer)
            ck.wait_staged()
        self.machine.run(self.optimizer.step)

    def copies(self) -> dict[str, Any]:
        """The state behind what is queued; there after a `drain`."""
        found: dict[str, Any] = {}
        self.machine.run(lambda: found.update(on_host(self.state())))
        return found

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "moments": self.optimizer.state_dict()["state"],
        }

    def _forward(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(32, 128, device=self.machine.name)
        self.model(inputs).square().mean().backward()


def on_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    return tree


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(same(found[key], value) for key, value in expected.items())
    return torch.equal(found, expected) if torch.is_tensor(expected) else found == expected


@pytest.mark.parametrize("mode", MODES)
def test_every_committed_step_is_the_state_at_its_step(
    root: Path, machine: Machine, mode: str
) -> None:
    run = Training(machine)
    options = Options(mode=mode, keep_last=None, chunk_bytes="64KiB", staging_bytes="1MiB")
    copies = {}
    with Checkpointer(root, options, devices=machine.devices) as ck:
        for step in range(6):
            run.step(ck)
            copies[step] = run.copies()
            ck.save(step, {"model": run.model, "optimizer": run.optimizer, "rng": RngState()})
    machine.drain()
    for step, expected in copies.items():
        tree = ckpt_core.load(root / f"step-{step:012d}")
        assert same(tree["model"], expected["model"])
        assert same(tree["optimizer"]["state"], expected["moments"])


@pytest.mark.parametrize("mode", MODES)
def test_a_state_is_restored_in_place_on_the_device(
    root: Path, machine: Machine, mode: str
) -> None:
    run = Training(machine)
    with Checkpointer(root, Options(mode=mode), devices=machine.devices) as ck:
        run.step(ck)
        expected = run.copies()
        ck.save(1, {"model": run.model, "optimizer": run.optimizer})
        ck.wait()
        places = [parameter.data_ptr() for parameter in run.model.parameters()]
        run.step(ck)
        assert ck.restore({"model": run.model, "optimizer": run.optimizer}) is not None
        found = run.copies()
    machine.drain()
    assert same(found, expected)
    assert [parameter.data_ptr() for parameter in run.model.parameters()] == places


@pytest.mark.parametrize("name", [CUDA])
def test_the_moments_of_a_fresh_optimizer_are_filled_where_its_parameters_are(
    root: Path, name: str
) -> None:
    machine = machine_of(name)
    run = Training(machine)
    with Checkpointer(root, devices=machine.devices) as ck:
        ck.save(1, {"optimizer": run.optimizer}).committed.result(60)
        expected = run.copies()["moments"]
        fresh = torch.optim.AdamW(run.model.parameters(), fused=True)
        # On one device alone, torch copies nothing that is there already.
        found = ck.restore({"optimizer": fresh})
    assert found is not None
    assert same(on_host(fresh.state_dict()["state"]), expected)
    loaded = found.state["optimizer"]["state"][0]["exp_avg"]
    first = next(iter(run.model.parameters()))
    assert fresh.state[first]["exp_avg"].data_ptr() == loaded.data_ptr()
    assert loaded.is_cuda


def test_strided_and_mixed_states_keep_their_bytes(root: Path, machine: Machine) -> None:
    base = machine.put(torch.randn(300, 400))
    half = machine.put(torch.randn(300, 400).bfloat16())
    state = {"t": base.t(), "rows": base[::3], "host": torch.randn(5000), "half": half}
    machine.run(lambda: base.add_(1))
    expected: dict[str, Any] = {}
    machine.run(lambda: expected.update(on_host(state)))
    with Checkpointer(root, devices=machine.devices) as ck:
        ck.save(1, state)
    machine.drain()
    assert same(ckpt_core.load(root), expected)


class Choosy(LateDevices):
    """Kernels that know the dtypes which those of CUDA do, in the releases that know least of them."""

    known = frozenset(
        {
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
            *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
        }
    )

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check([tensor])
        return super().clone(tensor)

    def collect(self, tensors: Any) -> torch.Tensor:
        self._check(tensors)
        return super().collect(tensors)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._check([*targets, *sources])
        super().copy_all(targets, sources)

    def _check(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype not in self.known:
                raise NotImplementedError(f"not implemented for {tensor.dtype}")


@pytest.mark.parametrize("name", ["late", CUDA])
@pytest.mark.parametrize("mode", ["auto", "host"])
def test_leaves_of_every_dtype_are_saved_and_restored(root: Path, name: str, mode: str) -> None:
    machine = OnLate(Choosy()) if name == "late" else machine_of(name)
    dtypes = [getattr(torch, dtype) for dtype in STORAGE if hasattr(torch, dtype)]
    state, expected = {}, {}
    for dtype in dtypes:
        for form, count in (("small", 64), ("two of them", 64), ("large", 4096)):
            bits = torch.arange(count).to(torch.uint8)
            if dtype is torch.bool:
                bits = bits % 2
            key = f"{dtype} {form}"
            expected[key], state[key] = bits, machine.put(bits.clone()).view(dtype)
        key = f"{dtype} strided"
        expected[key] = torch.arange(4096).to(torch.uint8) % 2
        state[key] = machine.put(expected[key].clone()).view(dtype).view(8, -1).t()
    options = Options(mode=mode, eager_leaf_bytes="1KiB")
    with Checkpointer(root, options, devices=machine.devices) as ck:
        ck.save(1, state).committed.result(timeout=60)
        assert ck.gauges.mode == ("device" if mode == "auto" else "host")
        for tensor in state.values():
            base = tensor.t() if tensor.dim() == 2 else tensor
            base.view(torch.uint8).zero_()
        assert ck.restore(state) is not None
    for key, tensor in state.items():
        base = tensor.t().reshape(-1) if tensor.dim() == 2 else tensor
        assert torch.equal(base.view(torch.uint8).cpu(), expected[key]), key


@pytest.mark.parametrize("mode", MODES)
def test_layer_by_layer_on_the_device(root: Path, machine: Machine, mode: str) -> None:
    run = Training(machine)
    tensors = dict(run.model.named_parameters())
    expected: dict[str, Any] = {}
    with Checkpointer(root, Options(mode=mode), devices=machine.devices) as ck:
        save = ck.begin(1, tensors)
        for name in reversed(list(tensors)):
            tensor = tensors[name].data
            machine.run(lambda tensor=tensor: tensor.mul_(2))
            machine.run(lambda name=name, tensor=tensor: expected.update({name: on_host(tensor)}))
            save.stage([name])
            ck.wait_staged([name])
            machine.run(tensor.zero_)
        save.seal({"model": run.model}).committed.result(timeout=60)
    machine.drain()
    assert same(ckpt_core.load(root)["model"], expected)


@pytest.mark.parametrize("name", ["training runs ahead", CUDA])
def test_a_missing_barrier_is_found_on_the_device(root: Path, name: str) -> None:
    machine = machine_of(name)
    size = 4_000_000 if name == "cuda" else 1_000_000
    state = {f"w{number}": machine.put(torch.randn(size)) for number in range(16)}
    options = Options(mode="host", debug_barrier=True, chunk_bytes="64KiB", staging_bytes="256KiB")
    with Checkpointer(root, options, devices=machine.devices) as ck:
        handle = ck.save(1, state)
        machine.run(lambda: state["w15"].add_(1))
        with pytest.raises(BarrierError, match="w15"):
            handle.committed.result(timeout=120)
        with pytest.raises(BarrierError):
            ck.wait()


class OnOne(LateDevices):
    """Waits are calls to the current device of a thread, device 0 at first; `strays` are those to it."""

    def __init__(self) -> None:
        super().__init__()
        self.current = threading.local()
        self.current.index = 1  # of the training thread
        self.strays: list[str] = []
        self.waits: set[str] = set()

    def use(self, stream: Any) -> None:
        self.make_current(stream.device)
        super().use(stream)

    def make_current(self, device: torch.device) -> None:
        self.current.index = device.index

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        return _WaitOnOne(**vars(super().record(device)))


class _WaitOnOne(LateEvent):
    def synchronize(self) -> None:
        assert isinstance(self.owner, OnOne)
        name = threading.current_thread().name
        self.owner.waits.add(name.rstrip("-0123456789"))
        if getattr(self.owner.current, "index", 0) != 1:
            self.owner.strays.append(name)
        super().synchronize()


@pytest.mark.parametrize("mode", ["host", "device"])
def test_no_thread_waits_on_another_device_than_the_one_in_use(root: Path, mode: str) -> None:
    devices = OnOne()
    state = [devices.place(torch.randn(50_000), 1) for _ in range(8)]
    options = Options(mode=mode, chunk_bytes="64KiB")
    with Checkpointer(root, options, devices=devices) as ck:
        ck.prepare(state)
        ck.save(1, state).committed.result(60)
        ck.restore(state)
    assert "ckpt-writer" in devices.waits
    assert not devices.strays
