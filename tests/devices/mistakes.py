"""Seeded mistakes: engines that wait too little, each by one wait; tests that miss one are worth nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ckpt_core.restore.slots import Slots
from ckpt_core.save.staging import Source, source_of
from ckpt_core.snapshot import StageItem
from ckpt_core.system.devices import Queued
from tests.devices.late_devices import LateDevices, LateEvent, LateStream, _Work

_HEAD_START_S = 0.02


class EventBeforeClones(LateDevices):
    """The event that the stager's streams wait for is recorded before the eager leaves are cloned."""

    def __init__(self, *pace: Any) -> None:
        super().__init__(*pace)
        self._held: list[tuple[LateStream, _Work]] = []

    def queue(self, stream: LateStream, work: _Work) -> None:
        if self._cloning():
            self._held.append((stream, work))
        else:
            super().queue(stream, work)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._first():
            return super().clone(tensor)

    def collect(self, tensors: Any) -> torch.Tensor:
        with self._first():
            return super().collect(tensors)

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        self._here.cloning = threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._here.cloning = False

    def queued(self, devices: Iterable[torch.device]) -> Queued:
        early = super().queued(devices)
        held, self._held = self._held, []
        for stream, work in held:
            super().queue(stream, work)
        return early

    def _cloning(self) -> bool:
        return getattr(self._here, "cloning", False)


class NoWaitForTraining(LateDevices):
    """The copy streams do not wait for the event."""

    def new_stream(self, device: torch.device) -> LateStream:
        stream = super().new_stream(device)
        stream.wait_event = lambda event: None  # type: ignore[method-assign]
        return stream


class _Deaf(LateDevices):
    """Threads of that name do not wait for events; all others come late."""

    thread = ""

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        return _DeafEvent(**vars(super().record(device)))


class _DeafEvent(LateEvent):
    def synchronize(self) -> None:
        assert isinstance(self.owner, _Deaf)
        if not threading.current_thread().name.startswith(self.owner.thread):
            time.sleep(_HEAD_START_S)
            super().synchronize()


class NoSynchronize(_Deaf):
    """The stager says that leaves are copied while the copies are queued."""

    thread = "ckpt-stager"


class NoHoldingBack(_Deaf):
    """Training goes on in its stream as soon as the copies are queued, while the stager is slow to wait."""

    thread = "nobody"

    def hold_back(self, behind: Queued) -> None:
        pass


class NoWaitForPieces(_Deaf):
    """The writers take pieces whose copies are queued."""

    thread = "ckpt-writer"


class NoWaitBeforeRestore(_Deaf):
    """A restore begins while training has work queued."""

    thread = "MainThread"


class EventOfTheFirstDevice(LateDevices):
    """Events are recorded on the current device, which is the first one, whatever the leaves are on."""

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        return super().record(self.devices[0])


class EventOfOneDevice(LateDevices):
    """Of the devices that leaves are on, one has an event."""

    def queued(self, devices: Iterable[torch.device]) -> Queued:
        return super().queued(list(devices)[:1])


def use_again_at_once(slots: Slots) -> memoryview:
    """`Slots.free`, without the wait for the copies of the last turn."""
    return slots._slots[0][0]


def end_at_once(slots: Slots) -> None:
    """`Slots.drain`, without a wait: a restore returns while copies are under way."""


def give_back_at_once(chunk: Any, copies: Any) -> None:
    """`image._give_back`, without the wait: of pieces that are not written, and of what is abandoned."""
    chunk.release()


def let_go_of_clones(*args: Any, **more: Any) -> Source:
    """`staging.source_of`, whose clones go as soon as the copies from them are queued."""
    source = source_of(*args, **more)
    return replace(source, frozen=_Dropping(source.frozen))


class _Dropping(list[StageItem]):
    def __iter__(self) -> Iterator[StageItem]:
        while self:
            yield self.pop(0)
