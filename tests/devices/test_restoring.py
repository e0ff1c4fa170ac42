"""A restore onto devices: queued copies, buffers used in turn, and no wait for each leaf."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, CorruptCheckpoint, Options, RestoreError
from ckpt_core.restore import RestoreRequest, RestoreWarning, filling, sending
from ckpt_core.state import Selection
from tests.devices import jobs
from tests.devices.late_devices import PACES, Hanging, LateDevices, LateEvent
from tests.restore.harness import Recipe, flip, restorer, write_step


@pytest.fixture(params=PACES)
def devices(request: pytest.FixtureRequest) -> LateDevices:
    return LateDevices(PACES[request.param])


def test_small_buffers_are_used_again_only_behind_their_copies(
    root: Path, devices: LateDevices
) -> None:
    jobs.restore_through_small_buffers(root, devices)


def test_what_objects_load_is_there_for_every_stream(root: Path, devices: LateDevices) -> None:
    jobs.restore_into_what_loads(root, devices)


class Slow:
    """Loads into a module of CUDA behind other work."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        on_device = {name: tensor.cuda() for name, tensor in state.items()}
        torch.cuda._sleep(500_000_000)
        self.module.load_state_dict(on_device)


@pytest.mark.cuda
def test_what_a_module_loads_is_there_for_every_stream(root: Path) -> None:
    module, stream = torch.nn.Linear(4096, 4096, device="cuda"), torch.cuda.Stream()
    expected = module.weight.detach().clone()
    with Checkpointer(root) as ck:
        ck.save(1, {"slow": Slow(module)}).committed.result(60)
        module.weight.data.zero_()
        torch.cuda.synchronize()
        assert ck.restore({"slow": Slow(module)}) is not None
        with torch.cuda.stream(stream):
            assert torch.equal(module.weight, expected)


def mixed(devices: LateDevices) -> dict[str, Any]:
    """Leaves of every form, on two devices and on the host."""
    torch.manual_seed(5)
    base, other = torch.randn(70, 300), torch.randn(40, 50, dtype=torch.complex64)
    for tensor, index in ((base, 0), (other, 1)):
        devices.place(tensor, index)
    made: dict[str, Any] = {"t": base.t(), "host": torch.randn(3_000), "conj": other.conj()}
    made["large"] = devices.place(torch.randn(700_000), 1)
    for index in range(40):
        kind = (torch.bfloat16, torch.int64, torch.bool, torch.float64)[index % 4]
        made[f"small{index}"] = devices.place(torch.randn(9, index).to(kind), index % 2)
    made["scalar"] = devices.place(torch.tensor(3.5), 0)
    made["host strided"] = torch.randn(30, 50).t()
    return made


def test_leaves_of_every_form_come_back(root: Path, devices: LateDevices) -> None:
    state = mixed(devices)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with Checkpointer(root, devices=devices) as ck:
        ck.save(1, state).committed.result(60)
        for tensor in state.values():
            tensor.zero_()
        assert ck.restore(state) is not None
    # The host has seen every copy done: nothing is waited for here.
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


class Counting(LateDevices):
    """Counts the copies onto devices and the waits for them."""

    sends = spreads = waits = 0

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.sends += 1
        super().send(target, source)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.spreads += 1
        super().copy_all(targets, sources)

    def finish(self, event: LateEvent) -> None:
        self.waits += 1
        super().finish(event)


def thousand(devices: LateDevices) -> dict[str, Any]:
    return {str(index): devices.place(torch.randn(97), 0) for index in range(1_000)}


def saved(root: Path, devices: LateDevices) -> dict[str, Any]:
    state = thousand(devices)
    with Checkpointer(root, devices=devices) as ck:
        ck.save(1, state).committed.result(60)
    return state


def test_a_thousand_small_leaves_take_one_copy_and_no_wait_for_each(root: Path) -> None:
    devices = Counting()
    state = saved(root, devices)
    live = {name: devices.place(torch.zeros(97), 0) for name in state}
    devices.waits = 0
    with Checkpointer(root, devices=devices) as ck:
        assert ck.restore(live) is not None
    assert all(torch.equal(live[name], state[name]) for name in state)
    assert (devices.sends, devices.spreads) == (1, 1)
    assert devices.waits < 10


class Full(Counting):
    """Devices that have no room for anything else any more."""

    is_full = False

    def flat(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.is_full:
            raise RuntimeError("out of memory")
        return super().flat(nbytes, device)


def test_on_a_full_device_small_leaves_travel_one_by_one(root: Path) -> None:
    devices = Full()
    state = saved(root, devices)
    live = {name: devices.place(torch.zeros(97), 0) for name in state}
    devices.is_full = True
    with Checkpointer(root, devices=devices) as ck:
        assert ck.restore(live) is not None
    assert all(torch.equal(live[name], state[name]) for name in state)
    assert (devices.sends, devices.spreads) == (len(state), 0)


class Unlockable(LateDevices):
    """The system refuses to page-lock memory."""

    def buffer(self, nbytes: int, device: torch.device) -> memoryview:
        raise RuntimeError("CUDA error: out of memory")


def test_memory_that_cannot_be_page_locked_is_replaced_with_one_warning(root: Path) -> None:
    devices = Unlockable()
    state = saved(root, devices)
    live = {name: devices.place(torch.zeros(97), 0) for name in state}
    with Checkpointer(root, devices=devices) as ck, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ck.restore(live) is not None
    assert [warning.category for warning in caught] == [RestoreWarning]
    assert "could not be page-locked: CUDA error" in str(caught[0].message)
    assert all(torch.equal(live[name], state[name]) for name in state)


class Breaking(LateDevices):
    """The tenth copy onto a device is refused."""

    left = 10

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("device lost")
        super().send(target, source)


def through_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "SLOT_BYTES", 8192)
    monkeypatch.setattr(sending, "SMALL_BYTES", 200)


def test_an_error_half_way_leaves_no_copy_under_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_small_buffers(monkeypatch)
    devices = Breaking()
    state = saved(root, devices)
    with (
        Checkpointer(root, devices=devices) as ck,
        pytest.raises(RestoreError, match="cuda:0 failed: device lost"),
    ):
        ck.restore(state)
    assert not devices.copies_left()


def test_a_restore_waits_for_what_training_has_queued_and_not_for_ever(root: Path) -> None:
    devices = Hanging()
    state = saved(root, devices)
    with Checkpointer(root, Options(timeout=0.5), devices=devices) as ck:
        devices.hangs = True
        expected = [tensor.clone() for tensor in state.values()]
        with pytest.raises(RestoreError, match="cuda:0 has not come to an end"):
            ck.restore(state)
        assert all(map(torch.equal, state.values(), expected))
        devices.hangs = False
        assert ck.restore(state) is not None


def test_a_restore_onto_a_device_that_has_failed_says_so(root: Path) -> None:
    devices = Hanging()
    state = saved(root, devices)
    with Checkpointer(root, devices=devices) as ck:
        devices.error = RuntimeError("device-side assert triggered")
        with pytest.raises(RestoreError, match="cuda:0 failed: device-side assert"):
            ck.restore(state)
        devices.error = None


class Crowded(LateDevices):
    """Devices that spread strided leaves only where they have as much room."""

    most = 0

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.is_contiguous() and target.nbytes > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB")
        super().send(target, source)


@pytest.mark.parametrize("most", [2_000, 0])
def test_on_a_full_device_strided_leaves_are_filled_in_smaller_blocks(
    root: Path, most: int
) -> None:
    devices = Crowded()
    devices.most = most
    strided = torch.randn(64, 64, 3, 3).contiguous(memory_format=torch.channels_last)
    state, expected = {"strided": devices.place(strided, 0)}, strided.clone()
    with Checkpointer(root, devices=devices) as ck:
        ck.save(1, state).committed.result(60)
        strided.zero_()
        if most:
            assert ck.restore(state) is not None
            assert torch.equal(strided, expected)
        else:
            with pytest.raises(RestoreError, match="cuda:0 failed: CUDA out of memory"):
                ck.restore(state)


def test_bytes_that_are_found_bad_leave_no_copy_under_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_small_buffers(monkeypatch)
    devices = LateDevices()
    state = saved(root, devices)
    flip(next((root / "step-000000000001").glob("*.safetensors")), 300_000)
    with Checkpointer(root, devices=devices) as ck, pytest.raises(CorruptCheckpoint):
        ck.restore(state, strict=True)
    assert not devices.copies_left()


def test_with_little_memory_the_buffers_are_small(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Asked(LateDevices):
        def buffer(self, nbytes: int, device: torch.device) -> memoryview:
            asked.append(nbytes)
            return super().buffer(nbytes, device)

    devices = Asked()
    state = saved(root, devices)
    monkeypatch.setattr(filling, "free_memory", lambda: 8_000_000)
    with Checkpointer(root, Options(readers=4), devices=devices) as ck:
        assert ck.restore(state) is not None
    assert len(asked) == 1
    assert asked[0] <= 1_000_000


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("form", ["in one run", "strided"])
def test_small_buffers_fill_the_host_too_from_a_file_that_holds_nothing_of_a_device(
    root: Path, monkeypatch: pytest.MonkeyPatch, form: str, checksum: bool
) -> None:
    devices = LateDevices()
    state = {"device 0": torch.randn(9_000), "host 0": torch.randn(600, 1_500)}
    # Bytes that nobody wants go through the buffer too.
    state |= {"device 1": torch.randn(9_000), "rest": torch.randn(40_000)}
    state |= {"device 2": torch.randn(9_000), "host 1": torch.randn(9_000)}
    recipe = Recipe(chunk_bytes=1 << 20, files=2, checksum=checksum)
    write_step(root, 1, state, recipe)
    monkeypatch.setattr(filling, "free_memory", lambda: 1_000_000)
    live = {name: torch.zeros_like(one) for name, one in state.items() if name != "rest"}
    for index in range(3):
        devices.place(live[f"device {index}"], 0)
    if form == "strided":
        live["host 0"] = torch.zeros(1_500, 600).t()
    request = RestoreRequest(part=Selection.of([*live]))
    assert restorer(root, devices=devices).restore(live, request) is not None
    assert all(torch.equal(tensor, state[name]) for name, tensor in live.items())


@pytest.mark.parametrize("fused", [False, True])
def test_counters_of_an_optimizer_that_are_on_the_device_stay_where_a_graph_reads_them(
    root: Path, devices: LateDevices, fused: bool
) -> None:
    parameters = [torch.nn.Parameter(torch.randn(50)) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters, fused=fused)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn(50)
        optimizer.step()

    step()
    rows = [tensor for row in optimizer.state.values() for tensor in row.values()]
    state = {"parameters": parameters, "optimizer": optimizer}
    for tensor in (*rows, *parameters):
        devices.place(tensor, 1)
    expected = [tensor.detach().clone() for tensor in (*rows, *parameters)]
    with Checkpointer(root, devices=devices) as ck:
        ck.save(1, state).committed.result(60)
        ck.wait_staged()
        step()
        assert ck.restore(state) is not None
    now = [tensor for row in optimizer.state.values() for tensor in row.values()]
    assert [tensor.data_ptr() for tensor in now] == [tensor.data_ptr() for tensor in rows]
    assert all(map(torch.equal, (*now, *parameters), expected))
