"""Devices that do everything late: a stand-in behind the engine's door to devices, for tests on any machine.

A tensor is on a device when its storage has been placed there; its memory is plain host memory. What is
asked through the door, and what training does (`run`), is queued on streams, and done when somebody waits
for it, or in between as the pace says. A stream is done in order; streams know of each other by events
alone. Until it is done, the memory that it is to fill is poisoned, and so is a clone's when it is let go.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt_core.system.devices import Devices, Queued

_UNWRITTEN, _RETURNED = 0xA5, 0xEE


@dataclass(frozen=True)
class Pace:
    """How likely it is that a stream does its next piece of work although nobody waits for it."""

    training: float
    copies: float
    seed: int = 0


PACES = {
    "all late": Pace(0, 0),
    "training runs ahead": Pace(1, 0),
    "copies run ahead": Pace(0, 1),
    "mixed, 1": Pace(0.5, 0.5, 1),
    "mixed, 2": Pace(0.2, 0.8, 2),
    "mixed, 3": Pace(0.8, 0.2, 3),
}


@dataclass
class LateEvent:
    """Behind the first `count` pieces of work of a stream."""

    owner: LateDevices
    stream: LateStream
    count: int

    @property
    def is_done(self) -> bool:
        return self.stream.done >= self.count

    def synchronize(self) -> None:
        self.owner.finish(self)

    def query(self) -> bool:
        """Nothing is done before somebody asks."""
        self.synchronize()
        return True


@dataclass
class _Work:
    """Something to do, or an event to wait for; `target` is the host memory that it writes."""

    do: Callable[[], Any] = lambda: None
    behind: LateEvent | None = None
    target: tuple[int, int] = (0, 0)


@dataclass
class LateStream:
    """A queue of one device."""

    owner: LateDevices
    device: torch.device
    is_training: bool
    waiting: deque[_Work] = field(default_factory=deque)
    done: int = 0

    @property
    def queued(self) -> int:
        return self.done + len(self.waiting)

    def wait_event(self, event: LateEvent) -> None:
        self.owner.queue(self, _Work(behind=event))


class LateDevices(Devices):
    """Two devices or more. Thread-safe; `failures` are uses of memory that no device allows."""

    def __init__(self, pace: Pace = PACES["all late"], count: int = 2) -> None:
        super().__init__()
        self.devices = [torch.device("cuda", index) for index in range(count)]
        self.failures: list[str] = []
        self._pace = pace
        self._random = random.Random(pace.seed)
        self._lock = threading.RLock()
        self._here = threading.local()
        self._default = {device: LateStream(self, device, True) for device in self.devices}
        self._streams = list(self._default.values())
        # Storage address -> device, and whose memory it is: of a clone the bytes, else a tensor.
        self._placed: dict[int, tuple[torch.device, Any]] = {}
        self._pinned: dict[int, int] = {}

    # -- for tests: what training does -------------------------------------------------------------

    def place(self, tensor: Tensor, index: int) -> Tensor:
        """Put a tensor's storage on a device."""
        address = tensor.untyped_storage().data_ptr()
        self._placed[address] = (self.devices[index], tensor.detach())
        return tensor

    def run(self, index: int, do: Callable[[], Any]) -> None:
        """Work of training, queued on this thread's current stream of a device."""
        self.queue(self._current(self.devices[index]), _Work(do))

    def own_stream(self, index: int) -> None:
        """Training on this thread goes on in a stream that is not the default one."""
        stream = LateStream(self, self.devices[index], True)
        with self._lock:
            self._streams.append(stream)
        self.use(stream)

    def drain(self) -> None:
        """Do everything that is queued."""
        for stream in tuple(self._streams):
            self.finish(LateEvent(self, stream, stream.queued))

    # -- the door ----------------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        """They record no graphs."""
        return False

    def in_use(self) -> bool:
        return True

    def of(self, tensor: Tensor) -> torch.device | None:
        found = self._placed.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found[0]

    def of_all(self, tensors: Iterable[Tensor]) -> list[torch.device]:
        return [device for device in dict.fromkeys(map(self.of, tensors)) if device is not None]

    def of_each(self, tensors: Sequence[Tensor]) -> list[torch.device | None]:
        return list(map(self.of, tensors))

    def and_current(self, devices: Iterable[torch.device]) -> list[torch.device]:
        return list(dict.fromkeys([*devices, self.devices[0]]))

    def is_flat(self, tensor: Tensor) -> bool:
        return self.of(tensor) is None and super().is_flat(tensor)

    def new_stream(self, device: torch.device) -> LateStream:
        stream = LateStream(self, device, False)
        with self._lock:
            self._streams.append(stream)
        return stream

    def use(self, stream: Any) -> None:
        self._currents()[stream.device] = stream

    def make_current(self, device: torch.device) -> None:
        """Each call of theirs names its device."""

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        self._some()
        stream = self._current(device)
        return LateEvent(self, stream, stream.queued)

    def clone(self, tensor: Tensor) -> Tensor:
        device = self.of(tensor)
        if device is None or tensor.numel() == 0:
            return super().clone(tensor)
        stream = self._current(device)
        made, raw = self._allocate(tensor, stream)
        source = self._raw(tensor)
        self.queue(stream, _Work(lambda: raw.copy_(source)))
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        device = self.of(source)
        if device is None:
            super().copy(target, source)
            return
        raw = self._raw(source)
        target.view(-1).view(torch.uint8).fill_(_UNWRITTEN)
        place = (target.data_ptr(), target.data_ptr() + target.nbytes)
        self.queue(self._current(device), _Work(lambda: target.copy_(raw), target=place))

    def to_host(self, tensor: Tensor) -> Tensor:
        device = self.of(tensor)
        if device is not None:
            self.finish(self.record(device))
        return tensor.detach().clone()

    def flat(self, nbytes: int, device: torch.device) -> Tensor:
        like = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return self._allocate(like, self._current(device))[0]

    def collect(self, tensors: Any) -> Tensor:
        (device,) = {self.of(tensor) for tensor in tensors}
        (_,) = {tensor.dtype for tensor in tensors}
        assert device is not None
        assert all(tensor.is_contiguous() for tensor in tensors)
        made = self.flat(sum(tensor.nbytes for tensor in tensors), device)
        places = made.split([tensor.nbytes for tensor in tensors])
        for place, tensor in zip(places, tensors, strict=True):
            self._copy_within(place.view(tensor.dtype).view(tensor.shape), tensor)
        return made

    def copy_all(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy_within(target, source)

    def hold_back(self, behind: Queued) -> None:
        for device, event in behind.events.items():
            self._current(device).wait_event(event)

    def ask_to_lock(self, address: int, nbytes: int, device: torch.device) -> int | None:
        self._pinned[address] = nbytes
        return 0

    def unpin(self, address: int, device: torch.device) -> None:
        end = address + self._pinned.pop(address, 0)
        if self.copies_into(address, end):
            self.failures.append("memory was unlocked while copies into it were queued")

    def free_bytes(self, device: torch.device | None = None) -> int:
        return 1 << 40

    def name(self) -> str:
        return "late"

    def copies_left(self) -> int:
        """Work that is queued on streams of the engine."""
        with self._lock:
            return sum(len(stream.waiting) for stream in self._streams if not stream.is_training)

    # -- the door: onto a device -------------------------------------------------------------------

    def buffer(self, nbytes: int, device: torch.device) -> memoryview:
        return memoryview(np.full(nbytes, _UNWRITTEN, np.uint8))

    def send(self, target: Tensor, source: Tensor) -> None:
        device, raw = self.of(target), self._raw(target)
        assert device is not None
        # The source as it is when its turn comes.
        self.queue(self._current(device), _Work(lambda: raw.copy_(source)))

    # -- inside ------------------------------------------------------------------------------------

    def _copy_within(self, target: Tensor, source: Tensor) -> None:
        device = self.of(target)
        assert device is not None
        assert (target.shape, device) == (source.shape, self.of(source))
        work = _Work(partial(self._raw(target).copy_, self._raw(source)))
        self.queue(self._current(device), work)

    def copies_into(self, start: int, end: int) -> int:
        """Copies that are queued and will write to host memory start..end."""
        with self._lock:
            targets = [work.target for stream in self._streams for work in stream.waiting]
        return sum(begin < end and start < stop for begin, stop in targets)

    def queue(self, stream: LateStream, work: _Work) -> None:
        with self._lock:
            stream.waiting.append(work)
        self._some()

    def finish(self, event: LateEvent) -> None:
        """Do what must be done before an event, and no more than that."""
        with self._lock:
            while not event.is_done:
                behind = event.stream.waiting[0].behind
                if behind is not None:
                    self.finish(behind)
                self._do_next(event.stream)

    def _some(self) -> None:
        """Do what the pace says, of what waits for nothing."""
        with self._lock:
            for stream in self._streams:
                chance = self._pace.training if stream.is_training else self._pace.copies
                while stream.waiting and self._random.random() < chance:
                    behind = stream.waiting[0].behind
                    if behind is not None and not behind.is_done:
                        break
                    self._do_next(stream)

    def _do_next(self, stream: LateStream) -> None:
        with torch.no_grad():
            stream.waiting[0].do()
        stream.waiting.popleft()
        stream.done += 1

    def _currents(self) -> dict[torch.device, LateStream]:
        if not hasattr(self._here, "streams"):
            self._here.streams = dict(self._default)
        streams: dict[torch.device, LateStream] = self._here.streams
        return streams

    def _current(self, device: torch.device) -> LateStream:
        return self._currents()[device]

    def _allocate(self, like: Tensor, stream: LateStream) -> tuple[Tensor, Tensor]:
        """Poisoned memory of a device, as the caller sees it, and for work that outlives it."""
        span = 1 + sum((n - 1) * step for n, step in zip(like.shape, _strides(like), strict=True))
        data = np.full(span * like.element_size(), _UNWRITTEN, np.uint8)
        lent = (c_char * data.nbytes).from_buffer(data)
        address = data.ctypes.data
        with self._lock:
            self._placed[address] = (stream.device, data)
        # Memory that is given back goes to the next who asks in the same stream, and is written there.
        weakref.finalize(lent, self._returned, address, data, stream)
        return _over(lent, like, _strides(like), 0), _over(data, like, _strides(like), 0)

    def _returned(self, address: int, data: Any, stream: LateStream) -> None:
        self._placed.pop(address, None)
        with self._lock:
            stream.waiting.append(_Work(lambda: data.fill(_RETURNED)))

    def _raw(self, tensor: Tensor) -> Tensor:
        """The same bytes, without keeping a clone alive: queued work does not, on a device."""
        home = self._placed[tensor.untyped_storage().data_ptr()][1]
        if isinstance(home, Tensor):
            return tensor.detach()
        return _over(home, tensor, tensor.stride(), tensor.storage_offset())


class Hanging(LateDevices):
    """From some moment on, what training has queued does not end, or the device has failed."""

    error: Exception | None = None
    hangs = False

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        return _HangingEvent(**vars(super().record(device)))


class _HangingEvent(LateEvent):
    def synchronize(self) -> None:
        assert isinstance(self.owner, Hanging)
        if threading.current_thread() is threading.main_thread():
            if self.owner.error is not None:
                raise self.owner.error
            assert not self.owner.hangs, "waited for without a deadline"
        super().synchronize()

    def query(self) -> bool:
        assert isinstance(self.owner, Hanging)
        return not self.owner.hangs and super().query()


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def _over(memory: Any, like: Tensor, strides: Iterable[int], offset: int) -> Tensor:
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, tuple(strides), offset)
