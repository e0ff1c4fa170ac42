"""The rows of the manifests."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.types import LeafSpec, Slice


@dataclass(frozen=True, slots=True)
class ChunkSum:
    """A piece of a file: its length and the checksum of its bytes, None when checksums are off."""

    nbytes: int
    xxh3: str | None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A shard file; `chunks` are its consecutive pieces from offset 0 to `nbytes`."""

    name: str
    nbytes: int
    chunks: tuple[ChunkSum, ...]


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """Where a leaf lies: `file` is an index in the rank's files, `offset` counts from its start."""

    spec: LeafSpec
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SliceEntry:
    """Where a rank's part of a shared leaf lies: `slice.nbytes` bytes at `offset` of `file`.

    `spec` is that of the whole leaf, `file` an index in the rank's files.
    """

    spec: LeafSpec
    slice: Slice
    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class RankEntry:
    """A rank manifest as the manifest knows it: name, length and checksum of all its bytes."""

    rank: int
    file: str
    nbytes: int
    xxh3: str
