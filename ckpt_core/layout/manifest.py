"""What a committed step consists of: a manifest for each rank, and one over all of them.

    manifest.json    Manifest: the step, and the size and checksum of every rank manifest
    rank-00000.json  RankManifest: the rank's files, where each leaf lies in them, the skeleton

A step of one rank has version 1, a step of several has version 2 in all of its manifests. Version 3 is no
step but a directory of files in a format of their own, for programs that know them by name.
`encode` and `decode` hold an object to the same rules (`rules.py`): what was written can be read.

Source: PCcheck 4.1 (what must be durable before a checkpoint counts); torchsnapshot's manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ckpt_core.layout import codec
from ckpt_core.layout.dtypes import MAX_BYTES
from ckpt_core.layout.entries import ChunkSum, FileEntry, LeafEntry, RankEntry, SliceEntry
from ckpt_core.layout.names import FORMAT_NAME, MAX_RANKS, is_directory_name, rank_manifest_name
from ckpt_core.layout.rules import (
    MAX_LEVELS,
    MAX_MANIFEST_BYTES,
    MAX_STEP,
    MAX_UNIX_S,
    check_entries,
    check_files,
    check_named_files,
    check_no_leaves,
    check_rank,
    check_version,
    check_xxh3,
)
from ckpt_core.layout.strict_json import Invalid, bounded, check_plain, member, row
from ckpt_core.types import Block, LeafSpec, Slice

Json = Any
"""A value that `json.dumps` writes and `json.loads` gives back unchanged."""

Entries = Callable[[], tuple[Sequence[LeafEntry], Sequence[SliceEntry]]]
_Entry = TypeVar("_Entry")
_AT_A_TIME = 1000

_ATTEMPT = re.compile(r"([0-9]{12,18})-[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class RankManifest:
    """What one rank wrote.

    Attributes:
        leaves: those that this rank stored whole, for itself alone.
        slices: its parts of leaves that it stored together with other ranks.
        version: 1 in a step of one rank, 2 in a step of several, 3 in a directory of files: then there
            are neither leaves nor slices, and files have any names.
    """

    rank: int
    files: tuple[FileEntry, ...]
    leaves: tuple[LeafEntry, ...]
    skeleton: Json
    slices: tuple[SliceEntry, ...] = ()
    version: int = 1

    def encode(self) -> bytes:
        """The bytes of `rank-NNNNN.json`.

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
        head = _head(self.rank, self.files, self.version)
        return {**head, **_rows(self.leaves, self.slices, self.version), "skeleton": self.skeleton}

    @classmethod
    def _from_json(cls, obj: dict[str, Json]) -> Self:
        if "skeleton" not in obj:
            raise Invalid("skeleton", expected="to be there", got=None)
        leaves = member(obj, "leaves", list) if obj["version"] < 3 else []
        shared = member(obj, "slices", list) if obj["version"] == 2 else []
        manifest = cls(
            rank=obj.get("rank"),  # type: ignore[arg-type]
            files=tuple([_file(value) for value in member(obj, "files", list)]),
            leaves=tuple([_leaf(value) for value in leaves]),
            skeleton=obj["skeleton"],
            slices=tuple([_slice(value) for value in shared]),
            version=obj["version"],
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        _check_head(self.rank, self.files, self.version)
        file_bytes = [file.nbytes for file in self.files]
        _check_rows(self.leaves, self.slices, file_bytes, self.version)
        check_plain(self.skeleton, "skeleton", levels=MAX_LEVELS)


class RankText:
    """The part of rank manifests that stays while the structure of a state does: checked and spelled once.

    Args:
        entries: gives the leaves and the slices; may be called again, from any thread.
        file_bytes: length of each of the rank's files.
        version: of the manifests.
    """

    def __init__(self, entries: Entries, file_bytes: Sequence[int], version: int) -> None:
        self._entries = entries
        self._file_bytes = tuple(file_bytes)
        self._version = version
        self._rows: dict[str, codec.Text] | None = None

    def encode(self, rank: int, files: Sequence[FileEntry], skeleton: str) -> bytes:
        """What `RankManifest.encode` gives; called from background threads.

        Args:
            skeleton: JSON of at most MAX_LEVELS levels.

        Raises:
            ConfigError: the manifest breaks the format's rules.
        """

        def build() -> dict[str, Json]:
            assert self._file_bytes == tuple([file.nbytes for file in files])
            _check_head(rank, files, self._version)
            rows = self._rows = self._rows or self._spell()
            head = _head(rank, files, self._version)
            return {**head, **rows, "skeleton": codec.Text(skeleton)}

        return codec.encode(build, what=f"manifest of rank {rank}")

    def _spell(self) -> dict[str, codec.Text]:
        leaves, slices = self._entries()
        _check_rows(leaves, slices, self._file_bytes, self._version)
        return _rows(leaves, slices, self._version)


def _check_rows(
    leaves: Sequence[LeafEntry],
    slices: Sequence[SliceEntry],
    file_bytes: Sequence[int],
    version: int,
) -> None:
    if version > 2:
        check_no_leaves(leaves, slices)
    if slices and version == 1:
        raise Invalid("slices", expected="none in version 1", got=len(slices))
    check_entries(leaves, slices, file_bytes)


def _check_head(rank: int, files: Sequence[FileEntry], version: int) -> None:
    check_version(version)
    check_rank(rank)
    if version > 2:
        check_named_files(files)
    else:
        check_files(files, rank=rank)


@dataclass(frozen=True)
class Manifest:
    """What a step consists of. Written last: the step is complete when this file is there.

    Attributes:
        ranks: those whose files lie beside this one, ascending: all, or those of one node.
        state_bytes: sum of the sizes of their leaves and slices.
        world_size: how many ranks saved together.
        version: 1 to 3; 0 stands for what the rest asks for, and is replaced at once.
        directory: name of a directory of files in the root; None: this is a step.
        pointer: the file in the root that was to name the directory; None: none was, or nobody noted it.
    """

    step: int
    attempt: str
    created_unix_s: float
    ranks: tuple[RankEntry, ...]
    state_bytes: int
    world_size: int = 1
    version: int = 0
    directory: str | None = None
    pointer: str | None = None

    def __post_init__(self) -> None:
        if self.version == 0:
            step = 1 if self.world_size == 1 else 2
            object.__setattr__(self, "version", step if self.directory is None else 3)

    def encode(self) -> bytes:
        """The bytes of `manifest.json`; called by the leading rank when every rank has voted.

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
        _check_manifest(self)
        return {
            "format": FORMAT_NAME,
            "version": self.version,
            "step": self.step,
            **({} if self.directory is None else {"directory": self.directory}),
            **({} if self.pointer is None else {"pointer": self.pointer}),
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
        manifest = cls(
            step=member(obj, "step", int),
            attempt=member(obj, "attempt", str),
            created_unix_s=obj.get("created_unix_s"),  # type: ignore[arg-type]
            ranks=ranks,
            state_bytes=member(obj, "state_bytes", int),
            world_size=member(obj, "world_size", int),
            version=obj["version"],
            directory=member(obj, "directory", str) if obj["version"] > 2 else None,
            pointer=obj.get("pointer") if obj["version"] > 2 else None,
        )
        _check_manifest(manifest)
        return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Step, attempt and time are in range; ranks ascend, each with its own file."""
    step = bounded(manifest.step, "step", 0, MAX_STEP)
    match = _ATTEMPT.match(manifest.attempt) if type(manifest.attempt) is str else None
    if match is None or match[1] != f"{step:012d}":
        raise Invalid("attempt", expected=f"{step:012d}-<8 hex>", got=manifest.attempt)
    created = manifest.created_unix_s
    if type(created) not in (int, float) or not 0 <= created <= MAX_UNIX_S:
        raise Invalid("created_unix_s", expected=f"seconds in 0..{MAX_UNIX_S}", got=created)
    bounded(manifest.state_bytes, "state_bytes", 0, MAX_BYTES)
    check_version(manifest.version)
    bounded(manifest.world_size, "world_size", 2 if manifest.version == 2 else 1, MAX_RANKS)
    _check_directory(manifest)
    bounded(len(manifest.ranks), "number of ranks", 1, manifest.world_size)
    if manifest.version == 1:
        bounded(len(manifest.ranks), "number of ranks", manifest.world_size, manifest.world_size)
    above = 0
    for entry in manifest.ranks:
        _check_rank_entry(entry, above, manifest.world_size - 1)
        above = entry.rank + 1


def _check_directory(manifest: Manifest) -> None:
    name = manifest.directory
    pointer = manifest.pointer
    if manifest.version < 3:
        if name is not None or pointer is not None:
            raise Invalid("directory", expected="none in a step", got=name or pointer)
    elif not is_directory_name(name):
        raise Invalid("directory", expected="a plain name, none of a step", got=name)
    elif pointer is not None and (not is_directory_name(pointer) or pointer == name):
        raise Invalid("pointer", expected="a plain name, not the directory's", got=pointer)


def _check_rank_entry(entry: RankEntry, low: int, high: int) -> None:
    bounded(entry.rank, "rank (ranks are in order)", low, high)
    if entry.file != rank_manifest_name(entry.rank):
        raise Invalid("rank manifest", expected=rank_manifest_name(entry.rank), got=entry.file)
    bounded(entry.nbytes, f"nbytes of {entry.file}", 1, MAX_MANIFEST_BYTES)
    check_xxh3(entry.xxh3, f"xxh3 of {entry.file}")


# -- rows: one function for each way ----------------------------------------------------------


def _head(rank: int, files: Sequence[FileEntry], version: int) -> dict[str, Json]:
    rows = [_file_object(file) for file in files]
    return {"format": FORMAT_NAME, "version": version, "rank": rank, "files": rows}


def _rows(
    leaves: Sequence[LeafEntry], slices: Sequence[SliceEntry], version: int
) -> dict[str, codec.Text]:
    rows = {"leaves": _spelled(leaves, _leaf_row)} if version < 3 else {}
    return {**rows, "slices": _spelled(slices, _slice_row)} if version == 2 else rows


def _spelled(entries: Sequence[_Entry], row_of: Callable[[_Entry], Json]) -> codec.Text:
    """A list of rows, some at a time: other threads wait while JSON is written."""
    parts = [
        codec.spell([row_of(entry) for entry in entries[start : start + _AT_A_TIME]])[1:-1]
        for start in range(0, len(entries), _AT_A_TIME)
    ]
    return codec.Text(f"[{','.join(parts)}]")


def _file_object(file: FileEntry) -> dict[str, Json]:
    chunks = [(chunk.nbytes, chunk.xxh3) for chunk in file.chunks]
    return {"name": file.name, "nbytes": file.nbytes, "chunks": chunks}


def _file(value: Json) -> FileEntry:
    if type(value) is not dict:
        raise Invalid("file", expected="an object", got=value)
    chunks = [ChunkSum(*row(chunk, "chunk row", 2)) for chunk in member(value, "chunks", list)]
    return FileEntry(member(value, "name", str), member(value, "nbytes", int), tuple(chunks))


def _leaf_row(leaf: LeafEntry) -> Json:
    spec = leaf.spec
    return (spec.name, spec.dtype, spec.shape, leaf.file, leaf.offset, leaf.nbytes)


def _leaf(value: Json) -> LeafEntry:
    name, dtype, shape, file, offset, size = row(value, "leaf row", 6)
    return LeafEntry(LeafSpec(name, dtype, _ints(shape, "shape")), file, offset, size)


def _slice_row(entry: SliceEntry) -> Json:
    spec, part = entry.spec, entry.slice
    block = None if part.block is None else (part.block.offsets, part.block.sizes)
    where = (entry.file, entry.offset, part.nbytes, part.begin)
    return (spec.name, spec.dtype, spec.shape, *where, block)


def _slice(value: Json) -> SliceEntry:
    name, dtype, shape, file, offset, size, begin, box = row(value, "slice row", 8)
    block = None
    if box is not None:
        offsets, sizes = row(box, "block", 2)
        block = Block(_ints(offsets, "block offsets"), _ints(sizes, "block sizes"))
    spec = LeafSpec(name, dtype, _ints(shape, "shape"))
    return SliceEntry(spec, Slice(begin, size, block), file, offset)


def _ints(value: Json, what: str) -> tuple[int, ...]:
    """A list as a tuple; `rules` looks at what is in it."""
    if type(value) is not list:
        raise Invalid(what, expected="a list", got=value)
    return tuple(value)
