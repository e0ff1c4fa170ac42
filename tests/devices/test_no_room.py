"""Where a device has no room for clones, saves go to the host, and nothing else changes; idle ones go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options
from ckpt_core.errors import StagingError
from ckpt_core.share import Auditor, Scope, Sharer
from ckpt_core.snapshot import CopyStreams, EagerCopies
from ckpt_core.state import flatten
from ckpt_core.types import RankInfo
from tests.devices.late_devices import Hanging, LateDevices


class Full(LateDevices):
    """Devices without room for more than some bytes at once, and a host that may have none either."""

    host_is_full = False

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.clones = 0

    def flat(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._check(nbytes)
        return super().flat(nbytes, device)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.of(tensor) is not None:
            self.clones += 1
            self._check(tensor.nbytes)
        return super().clone(tensor)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.host_is_full and threading.current_thread() is threading.main_thread():
            raise MemoryError
        if self.of(source) is not None and not source.is_contiguous():
            # A device collects it first; what is as small as this finds a place.
            self._check(source.nbytes - 2048)
        super().copy(target, source)

    def _check(self, nbytes: int) -> None:
        if nbytes > self.most:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")


@pytest.mark.parametrize("most", [100_000, 0])
def test_without_memory_for_clones_a_save_goes_to_the_host_and_says_so(
    root: Path, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Full(most)
    large, small = torch.randn(50_000), [torch.randn(5_000) for _ in range(40)]
    state = {"large": devices.place(large, 0), "small": [devices.place(x, 0) for x in small]}
    with Checkpointer(root, Options(mode="device", keep_last=2), devices=devices) as ck:
        for step in (1, 2):
            ck.save(step, state).committed.result(60)
            assert ck.gauges.mode == "host"
    assert sum("no room for clones" in line for line in caplog.messages) == 1
    tree = ckpt_core.load(root)
    devices.drain()
    assert torch.equal(tree["large"], large)
    assert all(torch.equal(a, b) for a, b in zip(tree["small"], small, strict=True))


def placed(devices: LateDevices) -> dict[str, torch.Tensor]:
    """Leaves of all sizes, kinds and places, by names that are files, too."""
    torch.manual_seed(0)
    state = {f"small-{index}": torch.randn(60) for index in range(30)}
    state |= {f"turned-{index}": torch.randn(50, 40).t() for index in range(4)}
    state |= {"half": torch.randn(100).half(), "none": torch.zeros(0), "large": torch.randn(9_000)}
    state |= {"large-turned": torch.randn(300, 40).t()}
    for index, tensor in enumerate(state.values()):
        if tensor.numel() and index % 7:
            devices.place(tensor, index % 2)
    return state


def plainly(ck: Checkpointer, state: dict[str, torch.Tensor], step: int) -> Any:
    return ck.save(step, state)


def layer_by_layer(ck: Checkpointer, state: dict[str, torch.Tensor], step: int) -> Any:
    save = ck.begin(step, {"large": state["large"]})
    try:
        save.stage(["large"])
        return save.seal(state)
    finally:
        save.abort()


def file_by_file(ck: Checkpointer, state: dict[str, torch.Tensor], step: int) -> Any:
    save = ck.begin_files(step, f"tag-{step}")
    try:
        save.add("one", state)
        return save.seal()
    finally:
        save.abort()


def saved(root: Path, step: int) -> Any:
    file = root / f"tag-{step}" / "one"
    return torch.load(file) if file.exists() else ckpt_core.load(root / f"step-{step:012d}")


Form = Callable[[Checkpointer, dict[str, torch.Tensor], int], Any]
FORMS: list[Form] = [plainly, layer_by_layer, file_by_file]


@pytest.mark.parametrize("mode", ["host", "device", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_a_device_without_any_room_lets_saves_go_to_the_host_until_it_has(
    root: Path, form: Form, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Full(0)
    state = placed(devices)
    options = Options(mode=mode, keep_last=None, chunk_bytes="16KiB", staging_bytes="1MiB")
    expected = []
    with Checkpointer(root, options, devices=devices) as ck:
        for step in range(4):
            devices.most = 0 if step < 2 else 1 << 40
            devices.clones = 0
            ck.wait_staged()
            for tensor in state.values():
                if (device := devices.of(tensor)) is not None:
                    devices.run(device.index, partial(tensor.add_, step))
            form(ck, state, step).committed.result(60)
            devices.drain()
            expected.append({name: tensor.clone() for name, tensor in state.items()})
            if form is plainly:
                usual = "host" if mode == "host" else "device"
                assert ck.gauges.mode == ("host" if step < 2 else usual)
            # It is asked until it says no, and then no more.
            assert (devices.clones <= 1) == (step < 2)
    assert not devices.failures
    assert sum("no room on cuda" in line for line in caplog.messages) == 1
    for step, tensors in enumerate(expected):
        tree = saved(root, step)
        assert [name for name in tensors if not torch.equal(tree[name], tensors[name])] == []


@pytest.mark.parametrize("form", FORMS)
def test_only_where_the_host_is_full_too_does_a_save_fail(root: Path, form: Form) -> None:
    devices = Full(0)
    state = placed(devices)
    with Checkpointer(root, Options(mode="device"), devices=devices) as ck:
        devices.host_is_full = True
        with pytest.raises(StagingError, match="neither on its device nor to the host"):
            form(ck, state, 1)
        devices.host_is_full, devices.most = False, 1 << 40
        ck.wait()
        form(ck, state, 2).committed.result(60)
    devices.drain()
    tree = saved(root, 2)
    assert all(torch.equal(tree[name], tensor) for name, tensor in state.items())


class HangingAndFull(Hanging, Full):
    """No room, and no end."""


@pytest.mark.parametrize("form", FORMS)
def test_a_save_without_room_waits_for_what_training_has_queued_and_not_for_ever(
    root: Path, form: Form
) -> None:
    devices = HangingAndFull(0)
    state = placed(devices)
    options = Options(timeout=0.5, on_error="warn")  # The watchdog may have given it up, too.
    with Checkpointer(root, options, devices=devices) as ck:
        devices.hangs = True
        with pytest.raises(StagingError, match="has not come to an end of what is queued"):
            form(ck, state, 1)
        devices.hangs = False
        ck.wait()
    assert not devices.failures


def marks(devices: LateDevices) -> dict[str, str]:
    torch.manual_seed(0)
    flat = flatten({"small": devices.place(torch.randn(60, 40).t(), 1)}, eager_leaf_bytes=1 << 20)
    share = Sharer(RankInfo(0, 2)).share(flat, Scope())
    audit, streams = Auditor().audit(share, flat.leaves, 0), CopyStreams(devices)
    audit.read_eager(streams, EagerCopies(devices, timeout_s=60))
    audit.read_lazy(streams)
    return audit.marks()


def test_ranks_that_have_room_and_those_that_have_none_see_the_same_of_a_replica() -> None:
    assert marks(Full(0)) == marks(LateDevices())


class Later(LateDevices):
    """Devices that have room for the second save alone; for the first the stager asks when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_ask = threading.Event()
        self.asked = 0

    def free_bytes(self, device: torch.device | None = None) -> int:
        self.may_ask.wait(60)
        self.asked += 1
        return 0 if self.asked == 1 else 1 << 40


def test_the_mode_used_is_that_of_the_last_save_and_not_of_an_older_one(root: Path) -> None:
    devices = Later()
    state = {"large": devices.place(torch.randn(50_000), 0)}
    with Checkpointer(root, Options(mode="device", in_flight=2), devices=devices) as ck:
        ck.save(1, state)
        ck.save(2, state)
        devices.may_ask.set()
        ck.wait()
        assert devices.asked == 2
        assert ck.gauges.mode == "device"


def test_the_memory_of_clones_goes_when_nothing_is_cloned_any_more(root: Path) -> None:
    devices = LateDevices()
    made: list[weakref.ref[Any]] = []
    make = devices.flat

    def flat(*args: Any) -> torch.Tensor:
        memory = make(*args)
        made.append(weakref.ref(memory.untyped_storage()))
        return memory

    devices.flat = flat  # type: ignore[method-assign]
    large, host = devices.place(torch.randn(50_000), 0), torch.randn(50_000)
    state = {"large": large}
    ways: list[tuple[str, dict[str, torch.Tensor], Callable[[], object]]] = [
        ("the policy", state, lambda: ck.gauges.prefer("host")),
        ("leaves that moved", {"large": host}, lambda: ck.gauges.prefer("auto")),
        ("a leaf on the host", {"large": large, "host": host}, lambda: ck.gauges.prefer("auto")),
    ]
    with Checkpointer(root, Options(mode="auto"), devices=devices) as ck:
        for number, (why, then, prefer) in enumerate(ways):
            ck.gauges.prefer("auto")
            ck.save(2 * number, state).committed.result(60)
            ck.wait()
            assert len(made) == number + 1 and made[-1]() is not None, why
            prefer()
            ck.save(2 * number + 1, then).committed.result(60)
            ck.wait()
            assert made[-1]() is None, why
        ck.gauges.prefer("auto")
        ck.save(10, state).committed.result(60)
    assert made[-1]() is None
