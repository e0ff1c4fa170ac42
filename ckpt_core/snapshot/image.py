"""Fill the image of one shard file, chunk by chunk, from front to back.

The image is written in file order: header, eager leaves, then the other leaves in the order in which they
become ready. A chunk that is full goes to the sink at once, so that writing overlaps copying. There is no
serialization step: bytes go from the live leaf to their place in the file image and nowhere else.

Only the training thread inside `save`, and after it only the stager thread, fill an image; its first chunks
may be handed over by a writer meanwhile.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ckpt_core.snapshot.copying import Buffer, move, move_all, write_all, zero
from ckpt_core.snapshot.pool import Chunk, Part, StagingPool
from ckpt_core.snapshot.runs import collected
from ckpt_core.snapshot.streams import CopyStreams
from ckpt_core.state import lies_at
from ckpt_core.system.devices import NOTHING_QUEUED, Queued
from ckpt_core.system.threads import own_lock
from ckpt_core.units import align_up

_log = logging.getLogger("ckpt_core")


@dataclass(frozen=True, slots=True)
class Piece:
    """A filled piece of a shard file, on its way to the writers.

    Attributes:
        index: its place in the sequence of chunks of the file.
        offset: its place in the file, bytes.
        nbytes: how much of the chunk counts.
        memory: the bytes.
        ready: copies of devices into the memory; before they have ended the bytes are not there.
        release: gives the memory back, behind those copies; called exactly once, also on failure.
    """

    index: int
    offset: int
    nbytes: int
    memory: memoryview
    ready: Queued
    release: Callable[[], None]


class ChunkSink(Protocol):
    """Where filled pieces go. persist/ implements it."""

    def submit(self, piece: Piece) -> None:
        """Take over a piece; returns at once. Never raises: a failure ends the checkpoint."""

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Memory that *is* bytes offset .. offset+nbytes of the shard file (DIRECT mode)."""


@dataclass(slots=True)
class _Open:
    """A chunk that is being filled."""

    memory: memoryview
    address: int
    tensor: Callable[[], torch.Tensor]
    release: Callable[[], None]
    lose: Callable[[], None]
    chunk: Chunk | None = None
    # Devices whose copy streams may still write to it.
    devices: set[torch.device] = field(default_factory=set)


@dataclass(slots=True)
class _Held:
    """The first chunks of a file, which are not handed over yet."""

    until: int
    pieces: list[tuple[int, _Open, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """What a shard image is to be.

    Attributes:
        file_bytes: length of the file, known from the start.
        front_bytes: everything before this offset uses front chunks.
        hold_bytes: keep the chunks before this offset back until `set_header` or `let_go`.
        mapped: write everything behind the front straight into the file's memory (DIRECT).
        deadline: on the monotonic clock; no wait for a chunk lasts longer.
        cancelled: asked while waiting for a chunk.
    """

    file_bytes: int
    front_bytes: int
    hold_bytes: int
    mapped: bool
    deadline: float
    cancelled: Callable[[], bool]


class ShardImage:
    """The bytes of one shard file, in the making: chunks come from `pool` and go, filled, to `sink`."""

    def __init__(
        self, pool: StagingPool, sink: ChunkSink, spec: ImageSpec, streams: CopyStreams
    ) -> None:
        self.pool = pool
        self._streams = streams
        self._sink = sink
        self._spec = spec
        self._chunk_bytes = pool.plan.chunk_bytes
        self._front_end = align_up(spec.front_bytes, self._chunk_bytes)
        self._held = _Held(until=spec.hold_bytes)
        self._letting_go = own_lock()
        # By address. Whatever becomes of the fields below when an interrupt comes, these are given back.
        self._taken: dict[int, Chunk] = {}
        self._open: _Open | None = None
        self._cursor = 0

    def header(self, header: bytes) -> None:
        """Write the header at the start of the image; called first, when the layout is known."""
        assert self._cursor == 0
        self._write_bytes(header)

    def skip_header(self, nbytes: int) -> None:
        """Leave room for a header that `set_header` brings later."""
        assert self._cursor == 0 and nbytes <= self._held.until
        self._zero_to(nbytes)

    def set_header(self, header: bytes) -> None:
        """Fill the room that was left and let the held chunks go."""
        assert len(header) <= self._held.until
        done = 0
        current = self._open
        for _, chunk, _ in [
            *self._held.pieces,
            *([(0, current, 0)] if current is not None else []),
        ]:
            part = header[done : done + self._chunk_bytes]
            chunk.memory[: len(part)] = part
            done += len(part)
        self.let_go()

    def let_go(self) -> None:
        """Hand over the chunks that were held back, and hold none from here on. Idempotent; any thread."""
        with self._letting_go:
            self._held.until, pieces = 0, self._held.pieces
            while pieces:
                offset, chunk, nbytes = pieces[0]
                self._submit(chunk, offset, nbytes)
                del pieces[0]

    def leaf(self, tensor: torch.Tensor, *, offset: int, nbytes: int) -> None:
        """Copy one leaf to its place, in `leaves`; blocks while no chunk is free.

        Leaves come in file order; the gap before each is filled with zeros.

        Raises:
            StagingError: no chunk became free in time.
            BarrierError: the leaf has lost its memory.
        """
        if nbytes == 0:
            return
        if offset != self._cursor:
            self._zero_to(offset)
        is_flat = self._streams.devices.is_flat(tensor)
        start = 0
        while start < nbytes:
            chunk, inside, room = self._room()
            part = min(room, nbytes - start)
            if is_flat:
                # Order matters: behind the wait for room, in which its memory may come to lie elsewhere.
                move(chunk.address + inside, lies_at(tensor) + start, part)
            else:
                self._take(chunk, inside, tensor, start, part)
            start += part
            self._advance(part)

    def flat(
        self,
        sources: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        buffers: Sequence[Buffer] = (),
    ) -> None:
        """Copy leaves that lie in host memory at these addresses, without gaps between them in the file.

        The same as `leaves`, quick for very many small ones. None of them is empty.

        Args:
            buffers: of each, or none.
        """
        done, count = 0, len(sizes)
        while done < count:
            assert offsets[done] == self._cursor, "a gap before a leaf"
            chunk, inside, room = self._room()
            # All but the last one that begins in this chunk end in it, and leave something of it.
            last = bisect_left(offsets, self._cursor + room, lo=done) - 1
            if last > done:
                if buffers:
                    write_all(chunk.memory, inside, buffers[done:last])
                else:
                    shift = chunk.address + inside - self._cursor
                    targets = map(shift.__add__, offsets[done:last])
                    move_all(targets, sources[done:last], sizes[done:last])
                self._cursor = offsets[last]
            self._move(sources[last], sizes[last])
            done = last + 1

    def leaves(self, items: Sequence[tuple[torch.Tensor, int, int]]) -> None:
        """Copy leaves (tensor, offset, nbytes) in file order; quick for many small ones.

        The same as `leaf` for each; leaves that fit into the open chunk without filling it, or the
        file, take a path without calls.
        """
        size, end = self._chunk_bytes, self._spec.file_bytes
        is_flat = self._streams.devices.is_flat
        for tensor, offset, nbytes in collected(items, self._streams):
            chunk = self._open
            inside = self._cursor % size
            if (
                chunk is None
                or offset != self._cursor
                or nbytes >= size - inside
                or offset + nbytes >= end
                or not is_flat(tensor)
            ):
                self.leaf(tensor, offset=offset, nbytes=nbytes)
            else:
                move(chunk.address + inside, lies_at(tensor), nbytes)
                self._cursor = offset + nbytes

    def finish(self) -> None:
        """Fill the rest of the file with zeros and hand over the last chunk."""
        self._zero_to(self._spec.file_bytes)
        assert self._open is None and not self._held.pieces

    def abandon(self) -> None:
        """Give back whatever is still held; the image is of no use after this. Idempotent.

        Returns once no copy can touch that memory.
        """
        with self._letting_go:
            chunks = [chunk for _, chunk, _ in self._held.pieces]
            chunks += [] if self._open is None else [self._open]
            self._held, self._open = _Held(until=0), None
            for chunk in chunks:
                self._taken.pop(chunk.address, None)
                _give_back(chunk, partial(self._streams.queued, chunk.devices))
            # What an interrupt has left to nobody: no copy was begun into it.
            while self._taken:
                self.pool.release(self._taken.popitem()[1])

    # -- inside ----------------------------------------------------------------------------------

    def _move(self, source: int, nbytes: int) -> None:
        """Copy bytes of host memory to where the cursor is."""
        end = source + nbytes
        while source < end:
            chunk, inside, room = self._room()
            part = min(room, end - source)
            move(chunk.address + inside, source, part)
            source += part
            self._advance(part)

    def _take(
        self, chunk: _Open, inside: int, tensor: torch.Tensor, start: int, nbytes: int
    ) -> None:
        """Copy a part of a leaf that is on a device, or strided."""
        device = self._streams.devices.of(tensor)
        if device is not None and chunk.chunk is not None:
            self._streams.lock(self.pool, chunk.chunk.segment, device)
        target = chunk.tensor()[inside : inside + nbytes]
        self._streams.copy(tensor, start, target, into=chunk.devices)

    def _write_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            chunk, inside, room = self._room()
            part = min(room, len(view))
            chunk.memory[inside : inside + part] = view[:part]
            view = view[part:]
            self._advance(part)

    def _zero_to(self, offset: int) -> None:
        # Chunks are reused: what is not overwritten would carry bytes of an older checkpoint.
        assert offset >= self._cursor
        while self._cursor < offset:
            chunk, inside, room = self._room()
            part = min(room, offset - self._cursor)
            zero(chunk.address + inside, part)
            self._advance(part)

    def _room(self) -> tuple[_Open, int, int]:
        """The open chunk, the place of the cursor in it, and how much still fits."""
        inside = self._cursor % self._chunk_bytes
        if self._open is None:
            self._open = self._next_chunk()
        return self._open, inside, self._chunk_bytes - inside

    def _next_chunk(self) -> _Open:
        offset = self._cursor - self._cursor % self._chunk_bytes
        if self._spec.mapped and offset >= self._front_end:
            length = min(self._chunk_bytes, self._spec.file_bytes - offset)
            memory = self._sink.window(offset, length)
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
            return _Open(memory, tensor.data_ptr(), lambda: tensor, lambda: None, lambda: None)
        part = Part.FRONT if offset < self._front_end else Part.STREAM
        chunk = self.pool.acquire(
            part, deadline=self._spec.deadline, cancelled=self._spec.cancelled, taken=self._taken
        )
        return _pooled(self.pool, chunk)

    def _advance(self, nbytes: int) -> None:
        self._cursor += nbytes
        full = self._cursor % self._chunk_bytes == 0 or self._cursor == self._spec.file_bytes
        if not full:
            return
        chunk = self._open
        assert chunk is not None
        offset = (self._cursor - 1) // self._chunk_bytes * self._chunk_bytes
        length = self._cursor - offset
        if offset < self._held.until:
            self._held.pieces.append((offset, chunk, length))
            self._open = None
        else:
            self._submit(chunk, offset, length)

    def _submit(self, chunk: _Open, offset: int, nbytes: int) -> None:
        ready = self._streams.queued(chunk.devices) if chunk.devices else NOTHING_QUEUED
        if chunk is self._open:
            self._open = None
        index = offset // self._chunk_bytes
        release = partial(_give_back, chunk, lambda: ready)
        self._taken.pop(chunk.address, None)
        self._sink.submit(Piece(index, offset, nbytes, chunk.memory[:nbytes], ready, release))
        if chunk.devices:
            self._streams.pace(ready, nbytes)


def _pooled(pool: StagingPool, chunk: Chunk) -> _Open:
    release, lose = partial(pool.release, chunk), partial(pool.lose, chunk)
    return _Open(chunk.memory, chunk.address, lambda: chunk.tensor, release, lose, chunk)


def _give_back(chunk: _Open, copies: Callable[[], Queued]) -> None:
    """Let go of a chunk when the copies into it have ended."""
    try:
        copies().wait()
    except Exception as exc:
        # Nobody can say whether the device still writes there.
        _log.error("staging memory is lost to a device: %s", exc)
        chunk.lose()
    else:
        chunk.release()
