"""Bytes from the buffers of readers onto devices: copies are queued, and nothing here waits for one.

    reader: read and hash a buffer -> queue its copies -> read the other buffer -> ... -> wait for all
    its copy stream on the device:   copy of a large leaf | copy of many small ones, spread on the device

Small leaves that lie side by side in the file travel as one copy: to queue one for each takes longer than the
bytes are under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt_core.restore.slots import SLOT_BYTES
from ckpt_core.state import FEW_ELEMENTS, blocks
from ckpt_core.system.devices import Devices, Queued, Stream

SMALL_BYTES = 1024 * 1024
"""Leaves below this travel together: to queue a copy takes about 10 microseconds."""


class Sender:
    """The copies of one restore. Each reader has a copy stream of its own on each device."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._here = threading.local()

    def lane(self, device: torch.device) -> Lane:
        """How this thread fills a device; the first call makes its copy stream the current one for good."""
        lanes: dict[torch.device, Lane] = self._here.__dict__.setdefault("lanes", {})
        if device not in lanes:
            # Order matters: asked for before the stream is changed, the room belongs to the stream of
            # fresh threads, and training gets it back from there; what was there before must be over.
            room = self._room(device)
            stream = self.devices.new_stream(device)
            stream.wait_event(self.devices.record(device))
            self.devices.use(stream)
            lanes[device] = Lane(stream, room)
        return lanes[device]

    def _room(self, device: torch.device) -> Tensor | None:
        try:
            return self.devices.flat(SLOT_BYTES, device)
        except RuntimeError:
            return None


class Lane(NamedTuple):
    """One reader's way to one device.

    Attributes:
        stream: its copies.
        room: memory of the device for leaves that travel together; None: there was none left.
    """

    stream: Stream
    room: Tensor | None


class Piece(NamedTuple):
    """Bytes of a run of a device's memory, from `start` on, and where they are in the reader's buffer."""

    memory: Tensor
    start: int
    nbytes: int
    at: int

    @property
    def target(self) -> Tensor:
        """Them alone."""
        if self.nbytes == len(self.memory):
            return self.memory
        return self.memory[self.start : self.start + self.nbytes]


class Batch:
    """What is queued from one buffer."""

    def __init__(self, sender: Sender, data: memoryview) -> None:
        self._sender = sender
        self._source = torch.frombuffer(data, dtype=torch.uint8)
        self._small: dict[torch.device, list[Piece]] = {}
        self._used: dict[torch.device, None] = {}

    def add_flat(self, device: torch.device, piece: Piece) -> None:
        """Fill a run of bytes of a device."""
        if piece.nbytes < SMALL_BYTES:
            self._small.setdefault(device, []).append(piece)
            return
        # What comes before and behind a large leaf travels in two copies: it is not sent twice.
        self._send_small(device)
        self._send(device, piece)

    def add_views(self, device: torch.device, views: Iterator[tuple[Tensor, int]], at: int) -> None:
        """Fill views of any strides, each with its byte behind `at` in the buffer."""
        self._take_lane(device)
        for target, offset in views:
            part = self._source[at + offset : at + offset + target.nbytes]
            self._send_view(target, part.view(target.dtype), most=target.numel())

    def queue(self) -> Queued:
        """Queue what is left; what to wait for before the buffer is used again."""
        for device in tuple(self._small):
            self._send_small(device)
        return self._sender.devices.queued(self._used)

    def settle(self) -> None:
        """Wait for what is queued, after an error."""
        self._sender.devices.queued(self._used).wait()

    # -- inside ----------------------------------------------------------------------------------

    def _take_lane(self, device: torch.device) -> Lane:
        lane = self._sender.lane(device)
        self._used[device] = None
        return lane

    def _send_view(self, target: Tensor, source: Tensor, *, most: int) -> None:
        try:
            self._sender.devices.send(target, source.view(target.shape))
        except RuntimeError:
            # A device spreads what is strided from memory of its own, and may have no room for it.
            if target.is_contiguous() or most <= FEW_ELEMENTS:
                raise
            most = most // 64
            for view, at in blocks(target, 0, target.numel(), most):
                self._send_view(view, source[at : at + view.numel()], most=most)

    def _send(self, device: torch.device, piece: Piece) -> None:
        self._take_lane(device)
        source = self._source[piece.at : piece.at + piece.nbytes]
        self._sender.devices.send(piece.target, source)

    def _send_small(self, device: torch.device) -> None:
        pieces = self._small.pop(device, [])
        room = self._take_lane(device).room if len(pieces) > 1 else None
        if room is None:
            for piece in pieces:
                self._send(device, piece)
            return
        start, stop = pieces[0].at, pieces[-1].at + pieces[-1].nbytes
        self._sender.devices.send(room[: stop - start], self._source[start:stop])
        parts = [room[x.at - start : x.at - start + x.nbytes] for x in pieces]
        self._sender.devices.copy_all([piece.target for piece in pieces], parts)
