"""The stager's copy streams: one for each device, behind training's streams and ahead of the writers.

Made with the pipeline; a stream is made when the first leaf of its device comes. Where no leaf is on one,
nothing here does anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from ckpt_core.snapshot.copying import copy_range
from ckpt_core.snapshot.pool import Segment, StagingPool
from ckpt_core.system.devices import NOTHING_QUEUED, Devices, Queued, Stream

_log = logging.getLogger("ckpt_core")


class CopyStreams:
    """Used by the stager thread alone; the training thread may copy host leaves through it."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._streams: dict[torch.device, Stream] = {}
        self._busy: set[torch.device] = set()
        # One for each device is enough: whatever is queued on its stream is done in order.
        self._mirrors: dict[torch.device, torch.Tensor] = {}

    def follow(self, behind: Queued) -> None:
        """Copies from now on run behind what training had queued."""
        for device, event in behind.events.items():
            stream = self.enter(device)
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
            self.enter(device)
        copy_range(tensor, start, target, devices=self.devices)

    def gather(
        self, device: torch.device, target: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Copy small parts of leaves of a device to host memory in one piece.

        A copy engine takes some microseconds for each copy, and Python ten: the parts are collected on the
        device first. What lies between them in the target becomes zero.

        Args:
            parts: where in the target, and what.
        """
        self.enter(device)
        mirror = self._mirror(device, target.numel())
        if mirror is None:
            for offset, part in parts:
                copy_range(part, 0, target[offset : offset + part.nbytes], devices=self.devices)
            return
        begin, (last, part) = parts[0][0], parts[-1]
        end = last + part.nbytes
        apart = sum(part.nbytes for _, part in parts) < end - begin
        self.devices.gather(mirror, parts, zero=apart)
        self.devices.copy(target[begin:end], mirror[begin:end])

    def lock(self, pool: StagingPool, segment: Segment, device: torch.device) -> None:
        """Have memory page-locked before copies of a device go there; takes a while the first time."""
        if not segment.asked:
            self.enter(device)
            pool.lock(segment, device)

    def queued_now(self) -> Queued:
        """What has been queued on all copy streams since the last `settle`."""
        return self.queued(tuple(self._busy)) if self._busy else NOTHING_QUEUED

    def queued(self, on: Iterable[torch.device]) -> Queued:
        """What is queued on the copy streams of these devices."""
        events = {}
        for device in on:
            self.enter(device)
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

    def _mirror(self, device: torch.device, nbytes: int) -> torch.Tensor | None:
        """Memory of a device, as long as a chunk; None: it has no room for that."""
        mirror = self._mirrors.get(device)
        if mirror is None or mirror.numel() != nbytes:
            self._mirrors.pop(device, None)
            mirror = self.flat(nbytes, device)
            if mirror is not None:
                self._mirrors[device] = mirror
        return mirror

    def flat(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory of a device for its copy stream; None: there is no room for it."""
        self.enter(device)
        try:
            return self.devices.flat(nbytes, device)
        except RuntimeError as exc:
            _log.warning("no %d bytes on %s for copies: %s", nbytes, device, exc)
            return None

    def enter(self, device: torch.device) -> Stream:
        """Have the copy stream of a device be the current one, and waited for by `settle`."""
        self._busy.add(device)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.devices.new_stream(device)
            # For good: nothing else is asked of devices on the stager thread.
            self.devices.use(stream)
        return stream
