"""What the door asks of a backend: the stream and the events of each device, and never another device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Options
from ckpt_core.snapshot import Sampler
from ckpt_core.system import page_locks
from ckpt_core.system.devices import Devices
from tests.devices.late_devices import LateDevices

KIND = "hpu"
"""A kind of device that torch knows the name of, and has no module for."""


@dataclass
class Stream:
    device: torch.device
    heard: list[Any] = field(default_factory=list)

    def wait_event(self, event: Any) -> None:
        self.heard.append(event)


@dataclass
class Event:
    blocking: bool
    behind: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.behind = stream


class Backend(ModuleType):
    """As much of a device module as the door may use. There is no way to set a device, or to ask for it."""

    def __init__(self) -> None:
        super().__init__(KIND)
        self.current: dict[torch.device, Stream] = {}

    Stream = Stream
    Event = Event

    def _lazy_init(self) -> None:
        """Torch asks for it before it refuses to make a tensor there."""

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[device]

    def set_stream(self, stream: Stream) -> None:
        self.current[stream.device] = stream


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    torch._register_device_module(KIND, made)  # type: ignore[arg-type]
    yield made
    delattr(torch, KIND)


def test_each_device_has_streams_and_events_of_its_own(backend: Backend) -> None:
    devices, asked = Devices(), [torch.device(KIND, index) for index in (2, 1)]
    for device in asked:
        devices.use(devices.new_stream(device))
    queued = devices.queued(asked)
    assert [event.behind.device for event in queued.events.values()] == asked
    assert list(queued.events) == asked


def test_events_sleep_where_the_backend_can(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, device = Devices(), torch.device(KIND, 0)
    devices.use(devices.new_stream(device))
    assert devices.record(device).blocking
    monkeypatch.setattr(backend, "Event", lambda: Event(blocking=False))
    assert not devices.record(device).blocking


@dataclass
class Runtime:
    """Page-locks memory, as CUDA's runtime does."""

    code: int = 0
    locked: list[int] = field(default_factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked.append(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            return 713
        self.locked.remove(address)
        return 0


def test_buffers_to_fill_devices_from_are_locked_until_nobody_has_them(backend: Backend) -> None:
    runtime = Runtime()
    backend.cudart = lambda: runtime
    backend.current_device = lambda: 0
    backend.device = lambda device: contextlib.nullcontext()
    # Of a number of its own: torch remembers the module of each device.
    buffer = Devices().buffer(8192, torch.device(KIND, 7))
    part = buffer[4096:]
    part[:2] = b"ok"
    assert runtime.locked == [torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()]
    assert runtime.locked[0] % 4096 == 0
    del buffer
    assert runtime.locked
    del part
    assert not runtime.locked


def test_a_refusal_to_lock_a_buffer_is_an_error_of_torchs_kind(backend: Backend) -> None:
    backend.cudart = lambda: Runtime(code=2)
    backend.current_device = lambda: 0
    backend.device = lambda device: contextlib.nullcontext()
    with pytest.raises(RuntimeError, match="error 2"):
        Devices().buffer(8192, torch.device(KIND, 8))


def test_memory_that_is_unlocked_twice_leaves_no_error_behind(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgot: list[torch.device] = []
    monkeypatch.setattr(page_locks, "_forget_error", forgot.append)
    runtime, devices, device = Runtime(), Devices(), torch.device(KIND, 13)
    backend.cudart = lambda: runtime
    assert devices.pin(4096, 4096, device)
    devices.unpin(4096, device)
    assert not forgot
    devices.unpin(4096, device)
    assert forgot == [device]


class Interrupted(contextlib.AbstractContextManager[None]):
    """Another device, and Ctrl-C before anybody has noted which one it was before."""

    def __init__(self, current: list[int], device: torch.device) -> None:
        self._current, self._device = current, device

    def __enter__(self) -> None:
        assert self._device.index is not None
        self._current[0] = self._device.index
        raise KeyboardInterrupt

    def __exit__(self, *exc: object) -> None:
        raise AssertionError("it was never entered")


def test_ctrl_c_while_a_buffer_is_locked_leaves_training_on_its_device(backend: Backend) -> None:
    current = [3]
    backend.cudart = Runtime
    backend.current_device = lambda: current[0]
    backend.set_device = lambda index: current.__setitem__(0, index)
    backend.device = lambda device: Interrupted(current, device)
    with pytest.raises(KeyboardInterrupt):
        Devices().buffer(8192, torch.device(KIND, 9))
    assert current == [3]


@dataclass
class Interrupting(Runtime):
    """Ctrl-C while memory is locked: Python sees it when the call returns."""

    mapped: list[bool] = field(default_factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        super().cudaHostRegister(address, nbytes, flags)
        raise KeyboardInterrupt

    def cudaHostUnregister(self, address: int) -> int:
        self.mapped.append(ctypes.string_at(address, 1) == b"\0")
        return super().cudaHostUnregister(address)


def test_ctrl_c_while_a_buffer_is_locked_leaves_nothing_locked_that_is_unmapped(
    backend: Backend,
) -> None:
    runtime = Interrupting()
    backend.cudart = lambda: runtime
    backend.current_device = lambda: 0
    backend.device = lambda device: contextlib.nullcontext()
    with pytest.raises(KeyboardInterrupt) as caught:
        Devices().buffer(8192, torch.device(KIND, 11))
    del caught
    gc.collect()
    assert runtime.mapped == [True]
    assert not runtime.locked and not page_locks.kept


class Unlocked(Runtime):
    """Interrupted before memory is locked."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        raise KeyboardInterrupt


def test_ctrl_c_before_a_buffer_is_locked_leaves_no_error_of_its_unlocking(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgot: list[torch.device] = []
    monkeypatch.setattr(page_locks, "_forget_error", forgot.append)
    backend.cudart = Unlocked
    backend.current_device = lambda: 0
    backend.device = lambda device: contextlib.nullcontext()
    device = torch.device(KIND, 12)
    with pytest.raises(KeyboardInterrupt) as caught:
        Devices().buffer(8192, device)
    del caught
    gc.collect()
    assert forgot == [device] and not page_locks.kept


def test_what_a_backend_lacks_is_said_once_and_by_its_name(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    devices, device = Devices(), torch.device(KIND, 10)
    for _ in range(2):
        assert not devices.pin(4096, 4096, device)
        assert not devices.has_room(1, device)
    assert len(caplog.messages) == 2
    assert f"torch.{KIND}.cudart" in caplog.messages[0]
    assert f"mem_get_info is missing in {KIND}" in caplog.messages[1]


def test_what_has_no_streams_counts_as_the_host() -> None:
    devices = Devices()
    assert devices.of(torch.zeros(2, device="meta")) is None
    assert devices.of(torch.zeros(2)) is None
    assert devices.of_all([torch.zeros(2)]) == []


class Streamless:
    """A tensor of a type of device without streams, such as MPS: its address is none of this process."""

    device, is_cpu = torch.device("mps"), False

    def data_ptr(self) -> int:
        raise AssertionError("would be read")


def test_what_is_on_a_device_without_streams_is_not_sampled() -> None:
    devices: Any = LateDevices()
    devices.of = Devices().of
    assert Sampler(devices).take([(Streamless(), 0, 4096)]) == []  # type: ignore[list-item]


class Cramped(LateDevices):
    """The second device has no room for clones, and the stager makes none."""

    def free_bytes(self, device: torch.device | None = None) -> int:
        return 1 << 40 if device == self.devices[0] else 1000

    def new_stream(self, device: torch.device) -> Any:
        self.clone = None  # type: ignore[assignment, method-assign]
        return super().new_stream(device)


def test_clones_are_made_only_where_every_device_has_room(root: Path) -> None:
    devices = Cramped()
    state = [devices.place(torch.randn(5_000), index) for index in range(2)]
    with Checkpointer(root, Options(mode="device"), devices=devices) as ck:
        ck.save(1, state).committed.result(60)


@pytest.mark.cuda
def test_memory_that_cannot_be_locked_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices, device = Devices(), torch.device("cuda", 0)
    target = torch.zeros(1000, device=device)
    with mmap.mmap(-1, 2**20) as mapping:
        memory = ctypes.c_char.from_buffer(mapping)
        address = ctypes.addressof(memory)
        assert devices.pin(address, 2**20, device)
        # Locked already.
        assert not devices.pin(address, 2**20, device)
        target.add_(1)
        torch.cuda.synchronize()
        devices.unpin(address, device)
        del memory
    assert "could not be page-locked" in caplog.text
    assert bool((target == 1).all())
