"""The bounded pool of staging chunks that all in-flight checkpoints share (PCcheck section 3.1).

A chunk is page-aligned memory that holds one piece of a shard file. Chunks are cut from one anonymous
mapping and reused for ever: the page faults of a first touch cost more than the copy itself. The free list
is last-in first-out, so that memory which was never needed is never touched.

The pool has two parts. *Front* chunks take what `save` copies on the training thread (header and eager
leaves); there are enough for every in-flight checkpoint, so that `save` finds one without waiting for
storage. *Stream* chunks carry the rest; when none is free the stager waits, and training only if it
reaches its next update meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.snapshot.cuda import pin, unpin
from ckpt_core.types import ALIGN_BYTES, align_up

_SMALLEST_CHUNK = ALIGN_BYTES
_POLL_S = 0.5


class Part(Enum):
    """Which part of the pool a chunk belongs to."""

    FRONT = "front"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How the staging memory is cut.

    Attributes:
        chunk_bytes: size of every chunk, a multiple of 4 KiB.
        fronts_per_save: front chunks that one checkpoint takes.
        front_chunks: fronts_per_save for each in-flight checkpoint.
        stream_chunks: chunks for everything else.
    """

    chunk_bytes: int
    fronts_per_save: int
    front_chunks: int
    stream_chunks: int

    @property
    def total_bytes(self) -> int:
        """Memory of the whole pool."""
        return self.chunk_bytes * (self.front_chunks + self.stream_chunks)

    def serves(self, need: PoolPlan) -> bool:
        """Whether a pool cut like this one also does for a state that asks for `need`."""
        return (
            self.fronts_per_save * self.chunk_bytes >= need.fronts_per_save * need.chunk_bytes
            and self.total_bytes * 5 >= need.total_bytes * 4
        )


def plan_pool(
    *,
    file_bytes: int,
    front_bytes: int,
    in_flight: int,
    chunk_bytes: int,
    staging_bytes: int | None,
    free_bytes: int,
) -> PoolPlan:
    """Cut the staging memory for a state of `file_bytes`, of which `front_bytes` are copied in `save`.

    Chunks get smaller than `chunk_bytes` when the state or the budget is small.

    Raises:
        ConfigError: `staging_bytes` cannot hold the front and one chunk more of each checkpoint.
    """
    budget = staging_bytes
    if budget is None:
        least = in_flight * (align_up(front_bytes, chunk_bytes) + 2 * chunk_bytes)
        budget = max(min(2 * file_bytes, free_bytes // 4), least)
    chunk = min(chunk_bytes, align_up(file_bytes, ALIGN_BYTES))
    while True:
        fronts = -(-front_bytes // chunk)
        most = budget // chunk
        wanted = max(-(-file_bytes // chunk) - fronts, 1)
        # One stream chunk for each checkpoint: a layer-wise one keeps its own open between layers.
        if most >= in_flight * (fronts + 1):
            stream = min(most - in_flight * fronts, in_flight * wanted)
            return PoolPlan(chunk, fronts, in_flight * fronts, stream)
        if chunk <= _SMALLEST_CHUNK:
            need = in_flight * (fronts + 1) * chunk
            raise ConfigError(
                f"staging_bytes={budget} is too small: {in_flight} checkpoints in flight copy "
                f"{front_bytes} bytes each inside save(), so at least {need} bytes are needed; "
                f"raise staging_bytes, or lower in_flight or eager_leaf_bytes"
            )
        chunk = align_up(chunk // 2, ALIGN_BYTES)


class Chunk:
    """One piece of staging memory: owned by the stager while it fills, then by the writers, then free."""

    __slots__ = ("_tensor", "address", "memory", "part")

    def __init__(self, memory: memoryview, address: int, part: Part) -> None:
        self.memory = memory
        self.address = address
        self.part = part
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor."""
        if self._tensor is None:
            self._tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        return self._tensor


class StagingPool:
    """Hands chunks out and takes them back; never holds more than its plan. Thread-safe."""

    def __init__(self, plan: PoolPlan, *, pinned: bool = False) -> None:
        self.plan = plan
        self._changed = threading.Condition()
        self._held = 0
        self._leases = 0
        self.most_held_bytes = 0
        self._mapping = mmap.mmap(-1, max(plan.total_bytes, ALIGN_BYTES))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._pinned_at = base if pinned else None
        if pinned:
            pin(base, plan.total_bytes)
        view = memoryview(self._mapping)
        self._free: dict[Part, list[Chunk]] = {Part.FRONT: [], Part.STREAM: []}
        for index in reversed(range(plan.front_chunks + plan.stream_chunks)):
            part = Part.FRONT if index < plan.front_chunks else Part.STREAM
            start = index * plan.chunk_bytes
            piece = view[start : start + plan.chunk_bytes]
            self._free[part].append(Chunk(piece, base + start, part))

    def touch(self) -> None:
        """Take every page fault now, so that the first checkpoint is as cheap as the later ones."""
        with self._changed:
            chunks = [*self._free[Part.FRONT], *self._free[Part.STREAM]]
        for chunk in chunks:
            chunk.tensor.zero_()

    def acquire(self, part: Part, *, deadline: float, cancelled: Callable[[], bool]) -> Chunk:
        """A free chunk; blocks while there is none.

        Args:
            deadline: on the `time.monotonic` clock.
            cancelled: asked now and then while waiting; true ends the wait.

        Raises:
            StagingError: the deadline passed, or the checkpoint was given up meanwhile.
        """
        with self._changed:
            while not self._free[part]:
                left = deadline - time.monotonic()
                if cancelled() or left <= 0:
                    why = "the checkpoint was given up" if left > 0 else "the deadline passed"
                    raise StagingError(
                        f"no staging chunk became free and {why}: storage is slower than the saves, or "
                        f"stuck; earlier steps are untouched. Save less often or raise staging_bytes"
                    )
                self._changed.wait(min(left, _POLL_S))
            self._held += 1
            held_bytes = self._held * self.plan.chunk_bytes
            self.most_held_bytes = max(self.most_held_bytes, held_bytes)
            return self._free[part].pop()

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back; its bytes may be overwritten at once."""
        with self._changed:
            self._held -= 1
            self._free[chunk.part].append(chunk)
            self._changed.notify_all()

    def lease(self) -> None:
        """Somebody will acquire chunks from now on, even if none is held at the moment."""
        with self._changed:
            self._leases += 1

    def end_lease(self) -> None:
        """Undo one `lease`."""
        with self._changed:
            self._leases -= 1
            self._changed.notify_all()

    def wait_idle(self, *, deadline: float) -> bool:
        """Wait until every chunk is back and no more are wanted; False when the deadline passed first."""
        with self._changed:
            while self._held or self._leases:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, _POLL_S))
            return True

    def close(self) -> None:
        """Let go of the memory. Called once, when no chunk is held."""
        if self._pinned_at is not None:
            unpin(self._pinned_at)
            self._pinned_at = None
        # The mapping itself goes with the last chunk that refers to it: it cannot be closed
        # while a memoryview of it lives.
        self._free = {Part.FRONT: [], Part.STREAM: []}
