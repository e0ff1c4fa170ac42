"""What a shard file is to be, and what the writers are given of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckpt_core.types import DirectIO

if TYPE_CHECKING:
    from ckpt_core.system.devices import Queued

SUM_BYTES = 1024 * 1024
"""Bytes under one checksum in steps of several ranks. Writes are longer, for the device's sake; whoever
restores a part of a file reads and verifies no more than the sums that the part lies in. Each sum is a turn
at the GIL, though: while training holds it, whole chunks were hashed at 5.8 GB/s and these at 1.4."""


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a shard file goes: its path, and whether a recycled file already lies there."""

    path: Path
    recycled: bool


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What a shard file is to be.

    Attributes:
        name: in its directory.
        nbytes: bytes that are written, a multiple of 4 KiB.
        place: finds the path; called once, from a background thread, and may raise our errors.
        direct_io: whether to go past the page cache.
        checksum: compute xxh3 of each piece.
        step: for error texts.
        mapped: pieces behind the front are written through `window` (DIRECT mode).
        sum_bytes: most bytes under one of them; None: whole pieces.
        exact_bytes: its length at last, less than 4 KiB below `nbytes`; None: `nbytes`. What is written
            behind it is cut off before the sync: direct writes come in multiples of 4 KiB.
        shared_at: it may be shared by later steps, and would be linked there; None: it is one step's alone.
        like: how the pieces of an earlier file looked; the first one that looks otherwise says that this one
            has changed, and will be shared by none. None: nobody has looked.
        show: told of each piece before it is written: its offset and bytes. By any writer. None: nobody.
    """

    name: str
    nbytes: int
    place: Callable[[], FilePlace]
    direct_io: DirectIO
    checksum: bool
    step: int
    mapped: bool = False
    sum_bytes: int | None = None
    exact_bytes: int | None = None
    shared_at: Callable[[], Path] | None = None
    like: tuple[bytes, ...] | None = None
    show: Callable[[int, memoryview], None] | None = None

    @property
    def file_bytes(self) -> int:
        """Its length."""
        return self.nbytes if self.exact_bytes is None else self.exact_bytes

    @property
    def takes_slot(self) -> bool:
        """Whether it may be written over a recycled file: named files are not."""
        return self.exact_bytes is None


class PieceLike(Protocol):
    """What the writers need of a filled staging chunk (snapshot.Piece)."""

    @property
    def index(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> memoryview: ...
    @property
    def ready(self) -> Queued: ...
    @property
    def release(self) -> Callable[[], None]: ...
