"""The bounded pool of staging chunks that all in-flight checkpoints share (PCcheck section 3.1).

A chunk is page-aligned memory that holds one piece of a shard file. Chunks are cut from one anonymous
mapping and reused for ever: the page faults of a first touch cost more than the copy itself. The free list
is last-in first-out, so that memory which will not be needed is never touched, huge pages aside.

The pool has two parts. *Front* chunks take what `save` copies on the training thread (header and eager
leaves); there are enough for every in-flight checkpoint, so that `save` finds one without waiting for
storage. *Stream* chunks carry the rest; when none is free the stager waits, and training only if it
reaches its next update meanwhile.

Where chunks are held back until a checkpoint is staged (pipelined=False), the pool must hold a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ckpt_core.errors import StagingError
from ckpt_core.snapshot.planning import PoolPlan
from ckpt_core.system.devices import Devices
from ckpt_core.system.pages import address_of, page_memory, touch
from ckpt_core.system.threads import Monitor, own_lock
from ckpt_core.units import ALIGN_BYTES

_SEGMENT_BYTES = 256 * 2**20
"""Page-locked at a time: a driver may hold up whatever else is asked of it meanwhile, for some 50 ms."""


_SPARE = 2
"""For so many chunks that were held at a time one more is touched ahead."""

_kept: dict[int, list[mmap.mmap]] = {}
"""Of pools that have lost memory to a device: it writes to addresses, and whatever lay there next would get
that, and what is page-locked must stay mapped."""


class Part(Enum):
    """Which part of the pool a chunk belongs to."""

    FRONT = "front"
    STREAM = "stream"


@dataclass(slots=True, eq=False)
class Segment:
    """Memory of a pool that is page-locked as a whole.

    Attributes:
        asked: somebody has tried to.
    """

    address: int
    nbytes: int
    asked: bool = False


class Chunk:
    """One piece of staging memory: owned by the stager while it fills, then by the writers, then free."""

    __slots__ = ("_tensor", "address", "memory", "part", "segment", "touched")

    def __init__(self, memory: memoryview, address: int, part: Part, segment: Segment) -> None:
        self.memory = memory
        self.address = address
        self.part = part
        self.segment = segment
        self.touched = False
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor."""
        if self._tensor is None:
            self._tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        return self._tensor


class StagingPool:
    """Hands chunks out and takes them back; never holds more than its plan. Thread-safe.

    Args:
        devices: page-lock the memory.
    """

    def __init__(self, plan: PoolPlan, devices: Devices) -> None:
        self.plan = plan
        self._changed = Monitor()
        self._leases: set[object] = set()
        self._lost: set[Chunk] = set()
        self._missing = 0
        self.most_held_bytes = 0
        self._devices = devices
        self._mappings: list[mmap.mmap] = []
        self._segments: list[Segment] = []
        self._locked: list[tuple[int, torch.device]] = []
        self._refused = False
        self._locking = own_lock()
        self.closed = False
        # Dicts as ordered sets: giving the same chunk back twice does no harm.
        self._free: dict[Part, dict[Chunk, None]] = {Part.FRONT: {}, Part.STREAM: {}}
        chunks = self._allocate(plan.front_chunks, plan.stream_chunks)
        for chunk in reversed(chunks):
            self._free[chunk.part][chunk] = None

    def extend(self, stream_chunks: int) -> None:
        """Add stream chunks while others are in use. Called by the training thread."""
        chunks = self._allocate(0, stream_chunks)
        with self._changed.lock:
            plan = self.plan
            larger = dataclasses.replace(plan, stream_chunks=plan.stream_chunks + stream_chunks)
            # Below the others: memory that has been touched is taken first.
            free = dict.fromkeys([*reversed(chunks), *self._free[Part.STREAM]])
            # Together: no interrupt comes between the two.
            self._free[Part.STREAM] = free
            self.plan = larger
            self._changed.notify_all()

    def _allocate(self, fronts: int, streams: int) -> list[Chunk]:
        size = self.plan.chunk_bytes
        nbytes = (fronts + streams) * size
        mapping = page_memory(max(nbytes, ALIGN_BYTES))
        self._mappings.append(mapping)
        base = address_of(mapping)
        span = max(_SEGMENT_BYTES // size, 1) * size
        segments = [
            Segment(base + start, min(span, nbytes - start)) for start in range(0, nbytes, span)
        ]
        self._segments += segments
        view = memoryview(mapping)
        parts = [Part.FRONT] * fronts + [Part.STREAM] * streams
        starts = range(0, nbytes, size)
        return [
            Chunk(view[start : start + size], base + start, part, segments[start // span])
            for start, part in zip(starts, parts, strict=True)
        ]

    def lock(self, segment: Segment, device: torch.device) -> None:
        """Page-lock a part of the memory, once; it is of use where that is refused, too.

        Called by the stager thread, whose current device is `device`: it takes a while.
        """
        with self._locking:
            if segment.asked or self.closed:
                return
            segment.asked = True
            if not self._refused:
                self._refused = not self._devices.pin(segment.address, segment.nbytes, device)
            if not self._refused:
                self._locked.append((segment.address, device))

    def segments(self) -> Sequence[Segment]:
        """All that can be locked, those first that are used first."""
        return tuple(self._segments)

    def touch(self) -> None:
        """Take every page fault now, so that the first checkpoint is as cheap as the later ones."""
        with self._changed.lock:
            chunks = [*self._free[Part.FRONT], *self._free[Part.STREAM]]
        for chunk in chunks:
            chunk.touched = True
            chunk.tensor.zero_()

    def touch_ahead(self, file_bytes: int) -> bool:
        """Take the page faults of one more stream chunk, where saves of this size may soon hold it.

        Copying outruns storage by some chunks more in each of the first saves, and the first touch of a chunk
        takes longer than a copy into it. Called by the stager thread; its bytes stay as they are, since
        somebody may have it by then.

        Returns:
            Whether there was one.
        """
        plan = self.plan
        whole = -(-file_bytes // plan.chunk_bytes) - plan.fronts_per_save
        with self._changed.lock:
            new = [chunk for chunk in self._free[Part.STREAM] if not chunk.touched]
            held = self.most_held_bytes // plan.chunk_bytes
            if not new or plan.stream_chunks - len(new) >= min(whole, held + held // _SPARE):
                return False
            # Taken before the others.
            chunk = new[-1]
            chunk.touched = True
        touch(chunk.address, len(chunk.memory))
        return True

    def acquire(
        self,
        part: Part,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
        taken: dict[int, Chunk] | None = None,
    ) -> Chunk:
        """A free chunk; blocks while there is none.

        Args:
            deadline: on the `time.monotonic` clock.
            cancelled: asked now and then while waiting; true ends the wait.
            taken: where the chunk is noted, by its address, before it is taken: an interrupt cannot lose it.

        Raises:
            StagingError: the deadline passed, or the checkpoint was given up meanwhile.
        """
        taken = {} if taken is None else taken
        got: list[Chunk] = []

        def take() -> bool:
            free = self._free[part]
            if not free:
                if self._missing and not self._held:
                    raise StagingError(
                        "all staging memory is lost to a device that has failed: committed steps are "
                        "untouched, and saving goes on in a new process"
                    )
                if cancelled():
                    raise _none_free("the checkpoint was given up")
                return False
            chunk = next(reversed(free))
            got.append(chunk)
            taken[chunk.address] = chunk
            chunk.touched = True
            del free[chunk]
            self.most_held_bytes = max(self.most_held_bytes, self._held * self.plan.chunk_bytes)
            return True

        if not self._changed.wait_for(take, deadline=deadline):
            raise _none_free("the deadline passed")
        return got[0]

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back that no copy can touch; its bytes may be overwritten at once. Idempotent."""
        with self._changed.lock:
            self._free[chunk.part][chunk] = None
            self._changed.notify_all()

    def lose(self, chunk: Chunk) -> None:
        """Never hand a chunk out again: a device that has failed may still write to it.

        The memory of the pool stays mapped, and locked, until the process ends.
        A new one takes its place, for saves of what lies elsewhere, until as many as the pool has are lost:
        who goes on saving from such a device must not use up the host.
        """
        streams = int(chunk.part is Part.STREAM)
        fresh: list[Chunk] = []
        if len(self._lost) < self.plan.front_chunks + self.plan.stream_chunks:
            with contextlib.suppress(OSError, MemoryError):
                fresh = self._allocate(1 - streams, streams)
        with self._changed.lock:
            self._lost.add(chunk)
            _kept[id(self._mappings)] = self._mappings
            self._free[chunk.part].update(dict.fromkeys(fresh))
            self._missing += not fresh
            self._changed.notify_all()

    def lease(self, owner: object) -> None:
        """`owner` will acquire chunks from now on, even if none is held at the moment. Idempotent."""
        with self._changed.lock:
            self._leases.add(owner)

    def end_lease(self, owner: object) -> None:
        """Undo `lease`. Idempotent."""
        with self._changed.lock:
            self._leases.discard(owner)
            self._changed.notify_all()

    def owners(self) -> tuple[object, ...]:
        """Those who have a lease."""
        with self._changed.lock:
            return tuple(self._leases)

    def wait_idle(self, *, deadline: float) -> bool:
        """Wait until every chunk is back and no more are wanted; False when the deadline passed first."""
        # Closed meanwhile: by a handler that came into this.
        return self._changed.wait_for(
            lambda: self.closed or not (self._held or self._leases), deadline=deadline
        )

    @property
    def _held(self) -> int:
        plan = self.plan
        free = len(self._free[Part.FRONT]) + len(self._free[Part.STREAM])
        return plan.front_chunks + plan.stream_chunks - free - self._missing

    def close(self) -> None:
        """Let go of the memory. Called when no chunk is held. Idempotent."""
        with self._locking:
            self.closed = True
            # Of a pool that is kept nothing is: a call for it may wait for a device that has failed.
            while self._locked and not self._lost:
                # Order matters: an interrupt may come before it is unlocked, and the memory goes then.
                self._devices.unpin(*self._locked[-1])
                self._locked.pop()
        # A mapping goes with the last chunk that refers to it: it cannot be closed while a memoryview
        # of it lives.
        self._free = {Part.FRONT: {}, Part.STREAM: {}}


def _none_free(why: str) -> StagingError:
    return StagingError(
        f"no staging chunk became free and {why}: storage is slower than the saves, or stuck; earlier steps "
        f"are untouched. Save less often or raise staging_bytes"
    )
