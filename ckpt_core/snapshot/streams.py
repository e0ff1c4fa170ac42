"""The stager's copy streams: one for each device, behind training's streams and ahead of the writers.

Made with the pipeline; a stream is made when the first leaf of its device comes. Where no leaf is on one,
nothing here does anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import torch

from ckpt_core.snapshot.copying import copy_range
from ckpt_core.snapshot.pool import Segment, StagingPool
from ckpt_core.system.devices import NOTHING_QUEUED, Devices, Queued, Stream

_log = logging.getLogger("ckpt_core")

_UNDER_WAY_BYTES = 64 * 2**20
"""Copies that are queued at a time: a copy engine takes its work in order, so that a small read of training's
own waits for all of it (1.2 ms at 55 GB/s), whatever the priorities of streams are. With a third of it the
engine ran dry now and then, while the stager waited for the interpreter's lock."""

_UNDER_WAY = 2
"""How many are queued at least, since one after another is slow."""


class CopyStreams:
    """Used by the stager thread alone; any thread may copy host leaves through it."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._streams: dict[torch.device, Stream] = {}
        self._busy: set[torch.device] = set()
        self._under_way: deque[tuple[int, Queued]] = deque()
        self._under_way_bytes = 0

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

    def lock(self, pool: StagingPool, segment: Segment, device: torch.device) -> None:
        """Have memory page-locked before copies of a device go there; takes a while the first time."""
        if not segment.asked:
            self.enter(device)
            pool.lock(segment, device)

    def pace(self, copies: Queued, nbytes: int) -> None:
        """Wait for earlier copies where much is queued besides these.

        Raises:
            StagingError: a device has failed.
        """
        self._under_way.append((nbytes, copies))
        self._under_way_bytes += nbytes
        while self._under_way_bytes > _UNDER_WAY_BYTES and len(self._under_way) > _UNDER_WAY:
            size, oldest = self._under_way.popleft()
            self._under_way_bytes -= size
            oldest.wait()

    def queued_now(self) -> Queued:
        """What has been queued on all copy streams since the last `settle`."""
        return self.queued(tuple(self._busy)) if self._busy else NOTHING_QUEUED

    def queued(self, on: Iterable[torch.device]) -> Queued:
        """What is queued on the copy streams of these devices."""
        events = {}
        for device in on:
            events[device] = self.devices.record(device, self.enter(device))
        return Queued(events, self.devices.make_current)

    def settle(self) -> None:
        """Wait until every copy and clone that was queued is done; it blocks no stream of training."""
        self._under_way.clear()
        self._under_way_bytes = 0
        if self._busy:
            try:
                self.queued(tuple(self._busy)).wait()
            finally:
                # A device that has failed fails this save, and not those of leaves elsewhere.
                self._busy.clear()

    def settle_after_error(self) -> None:
        """The same where an error is told already, which a device's own would hide."""
        try:
            self.settle()
        except Exception as exc:
            _log.error("nobody knows what a device still reads or writes: %s", exc)

    def flat(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory of a device for its copy stream; None: there is no room for it."""
        self.enter(device)
        try:
            return self.devices.flat(nbytes, device)
        except RuntimeError as exc:
            # Whoever asked says what becomes of it.
            _log.info("no %d bytes on %s for copies: %s", nbytes, device, exc)
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
