"""What a committed step consists of: a manifest for each rank, and one over all of them.

    manifest.json    Manifest: the step, and the size and checksum of every rank manifest
    rank-00000.json  RankManifest: the rank's files, where each leaf lies in them, the skeleton

`encode` and `decode` hold an object to the same rules (`rules.py`): what was written can be read.

Source: PCcheck 4.1 (what must be durable before a checkpoint counts); torchsnapshot's manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckpt_core.layout import codec
from ckpt_core.layout.names import FORMAT_NAME, FORMAT_VERSION
from ckpt_core.layout.rules import MAX_LEVELS, check_files, check_leaves, check_manifest, check_rank
from ckpt_core.layout.strict_json import Invalid, check_plain, member, row
from ckpt_core.types import LeafSpec

Json = Any
"""A value that `json.dumps` writes and `json.loads` gives back unchanged."""


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
class RankEntry:
    """A rank manifest as the manifest knows it: name, length and checksum of all its bytes."""

    rank: int
    file: str
    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class RankManifest:
    """What one rank wrote."""

    rank: int
    files: tuple[FileEntry, ...]
    leaves: tuple[LeafEntry, ...]
    skeleton: Json

    def encode(self) -> bytes:
        """The bytes of `rank-NNNNN.json`; called from a background thread.

        Raises:
            ConfigError: the object breaks the format's rules, or the skeleton is no JSON.
        """
        return codec.encode(self._as_json, what=f"manifest of rank {self.rank}")

    @classmethod
    def decode(cls, data: bytes, *, path: Path) -> Self:
        """The manifest that `data` holds; `path` is named in errors, never opened.

        Raises:
            CorruptCheckpoint: not what `encode` writes.
            UnknownFormat: written by a newer format.
        """
        return codec.decode(cls._from_json, data, path=path)

    def _as_json(self) -> dict[str, Json]:
        self._check()
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "rank": self.rank,
            "files": [
                {
                    "name": file.name,
                    "nbytes": file.nbytes,
                    "chunks": [(chunk.nbytes, chunk.xxh3) for chunk in file.chunks],
                }
                for file in self.files
            ],
            "leaves": [
                (
                    leaf.spec.name,
                    leaf.spec.dtype,
                    leaf.spec.shape,
                    leaf.file,
                    leaf.offset,
                    leaf.nbytes,
                )
                for leaf in self.leaves
            ],
            "skeleton": self.skeleton,
        }

    @classmethod
    def _from_json(cls, obj: dict[str, Json]) -> Self:
        if "skeleton" not in obj:
            raise Invalid("skeleton", expected="to be there", got=None)
        files = tuple([_file(value) for value in member(obj, "files", list)])
        leaves = tuple([_leaf(value) for value in member(obj, "leaves", list)])
        manifest = cls(obj.get("rank"), files, leaves, obj["skeleton"])  # type: ignore[arg-type]
        manifest._check()
        return manifest

    def _check(self) -> None:
        check_rank(self.rank)
        check_files(self.files, rank=self.rank)
        check_leaves(self.leaves, self.files)
        check_plain(self.skeleton, "skeleton", levels=MAX_LEVELS)


@dataclass(frozen=True)
class Manifest:
    """What a step consists of. Written last: the step is complete when this file is there."""

    step: int
    attempt: str
    created_unix_s: float
    ranks: tuple[RankEntry, ...]
    state_bytes: int

    @property
    def world_size(self) -> int:
        """How many ranks saved together."""
        return len(self.ranks)

    def encode(self) -> bytes:
        """The bytes of `manifest.json`; called by rank 0 when every rank has voted.

        Raises:
            ConfigError: the object breaks the format's rules.
        """
        return codec.encode(self._as_json, what=f"manifest of step {self.step}")

    @classmethod
    def decode(cls, data: bytes, *, path: Path) -> Self:
        """The manifest that `data` holds; `path` is named in errors, never opened.

        Raises:
            CorruptCheckpoint: not what `encode` writes.
            UnknownFormat: written by a newer format.
        """
        return codec.decode(cls._from_json, data, path=path)

    def _as_json(self) -> dict[str, Json]:
        check_manifest(self)
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "created_unix_s": self.created_unix_s,
            "world_size": self.world_size,
            "state_bytes": self.state_bytes,
            "ranks": [(entry.rank, entry.file, entry.nbytes, entry.xxh3) for entry in self.ranks],
        }

    @classmethod
    def _from_json(cls, obj: dict[str, Json]) -> Self:
        rows = member(obj, "ranks", list)
        ranks = tuple([RankEntry(*row(value, "rank row", 4)) for value in rows])
        if member(obj, "world_size", int) != len(ranks):
            raise Invalid("world_size", expected=str(len(ranks)), got=obj["world_size"])
        manifest = cls(
            step=member(obj, "step", int),
            attempt=member(obj, "attempt", str),
            created_unix_s=obj.get("created_unix_s"),  # type: ignore[arg-type]
            ranks=ranks,
            state_bytes=member(obj, "state_bytes", int),
        )
        check_manifest(manifest)
        return manifest


def _file(value: Json) -> FileEntry:
    if type(value) is not dict:
        raise Invalid("file", expected="an object", got=value)
    chunks = [ChunkSum(*row(chunk, "chunk row", 2)) for chunk in member(value, "chunks", list)]
    return FileEntry(member(value, "name", str), member(value, "nbytes", int), tuple(chunks))


def _leaf(value: Json) -> LeafEntry:
    name, dtype, shape, file, offset, size = row(value, "leaf row", 6)
    if type(shape) is not list:
        raise Invalid("shape", expected="a list", got=shape)
    return LeafEntry(LeafSpec(name, dtype, tuple(shape)), file, offset, size)
