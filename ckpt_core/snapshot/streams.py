"""The stager's copy streams: one for each device, behind training's streams and ahead of the writers.

Made with the pipeline; a stream is made when the first leaf of its device comes. Where no leaf is on one,
nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckpt_core.snapshot.copying import copy_range
from ckpt_core.system.devices import Devices, Queued, Stream


class CopyStreams:
    """Used by the stager thread alone; the training thread may copy host leaves through it."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._streams: dict[torch.device, Stream] = {}
        self._busy: set[torch.device] = set()

    def follow(self, behind: Queued) -> None:
        """Copies from now on run behind what training had queued."""
        for device, event in behind.events.items():
            stream = self._on(device)
            self.devices.use(stream)
            stream.wait_event(event)

    def copy(
        self, tensor: torch.Tensor, start: int, target: torch.Tensor, *, into: set[torch.device]
    ) -> None:
        """Copy bytes of a leaf, from row-major byte `start` on; see `copy_range`.

        Args:
            into: the devices that the target's memory is waiting for; gets that of the leaf.
        """
        device = self.devices.of(tensor)
        if device is not None:
            # Before the first byte is queued: an error may leave a part of the copy behind.
            into.add(device)
            self._on(device)
        copy_range(tensor, start, target, devices=self.devices)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A clone of a leaf, on its device; to be kept until `settle` or the end of the copies from it."""
        device = self.devices.of(tensor)
        if device is not None:
            self._on(device)
        return self.devices.clone(tensor)

    def queued(self, on: Iterable[torch.device]) -> Queued:
        """What is queued on the copy streams of these devices."""
        events = {}
        for device in on:
            self._on(device)
            events[device] = self.devices.record(device)
        return Queued(events)

    def settle(self) -> None:
        """Wait until every copy and clone that was queued is done; it blocks no stream of training."""
        if self._busy:
            try:
                self.queued(tuple(self._busy)).wait()
            finally:
                # A device that has failed fails this save, and not those of leaves elsewhere.
                self._busy.clear()

    def _on(self, device: torch.device) -> Stream:
        self._busy.add(device)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.devices.new_stream(device)
            # For good: nothing else is asked of devices on the stager thread.
            self.devices.use(stream)
        return stream
