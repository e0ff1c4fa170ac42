"""Steps written by hand, the plainest way, and file layers that misbehave under the real reader.

Nothing here uses the engine: what it writes is what docs/format.md says, and each part can be made wrong.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt_core.layout import (
    MANIFEST_NAME,
    ChunkSum,
    FileEntry,
    LeafEntry,
    Manifest,
    RankEntry,
    RankManifest,
    ShardLayout,
    rank_manifest_name,
    shard_name,
)
from ckpt_core.restore import RestoredStep, Restorer, RestoreRequest
from ckpt_core.state import Leaf, flatten
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Buffer, Files
from ckpt_core.types import step_dir_name

SHARD, RANK = shard_name(0, 0), rank_manifest_name(0)
CHUNK_BYTES = 4096


@dataclass(frozen=True)
class Recipe:
    """How a step is written.

    Attributes:
        chunk_bytes: length of each checksum chunk.
        checksum: whether chunks have one.
        files: leaves are dealt out to this many shard files.
        eager_leaf_bytes: leaves up to this size come first.
    """

    chunk_bytes: int = CHUNK_BYTES
    checksum: bool = True
    files: int = 1
    eager_leaf_bytes: int = 256


PLAIN = Recipe()


def write_step(root: Path, step: int, state: Any, recipe: Recipe = PLAIN) -> Path:
    """Write a committed step of `state`; its directory."""
    path = root / step_dir_name(step)
    path.mkdir(parents=True)
    flat = flatten(state, eager_leaf_bytes=recipe.eager_leaf_bytes)
    entries: list[FileEntry] = []
    leaves: list[LeafEntry] = []
    for index in range(recipe.files):
        data, placed = shard_bytes(flat.leaves[index :: recipe.files], index)
        name = shard_name(0, index)
        (path / name).write_bytes(data)
        entries.append(FileEntry(name, len(data), chunk_sums(data, recipe)))
        leaves += placed
    rank = RankManifest(0, tuple(entries), tuple(leaves), flat.skeleton.to_json())
    write_manifests(path, step, [rank])
    return path


def shard_bytes(leaves: Sequence[Leaf], index: int) -> tuple[bytes, list[LeafEntry]]:
    """The bytes of a shard file, and where its leaves are."""
    layout = ShardLayout.plan(
        [leaf.spec for leaf in leaves if leaf.eager],
        [leaf.spec for leaf in leaves if not leaf.eager],
    )
    by_name = {leaf.spec.name: leaf for leaf in leaves}
    data = bytearray(layout.file_bytes)
    data[: len(layout.header)] = layout.header
    placed = []
    for extent in layout.extents:
        leaf = by_name[extent.name]
        data[extent.offset : extent.offset + extent.nbytes] = tensor_bytes(leaf.tensor)
        placed.append(LeafEntry(leaf.spec, index, extent.offset, extent.nbytes))
    return bytes(data), placed


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major bytes."""
    whole = torch.empty(tensor.numel(), dtype=tensor.dtype)
    whole.view(tensor.shape).copy_(tensor.detach())
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def chunk_sums(data: bytes, recipe: Recipe = PLAIN) -> tuple[ChunkSum, ...]:
    pieces = [
        data[start : start + recipe.chunk_bytes]
        for start in range(0, len(data), recipe.chunk_bytes)
    ]
    return tuple(
        ChunkSum(len(piece), xxhash.xxh3_64_hexdigest(piece) if recipe.checksum else None)
        for piece in pieces
    )


def write_manifests(path: Path, step: int, ranks: Sequence[RankManifest]) -> None:
    """Write all manifests of a step, whatever the rank manifests say."""
    entries = []
    for rank in ranks:
        data = rank.encode()
        (path / rank_manifest_name(rank.rank)).write_bytes(data)
        digest = xxhash.xxh3_64_hexdigest(data)
        entries.append(RankEntry(rank.rank, rank_manifest_name(rank.rank), len(data), digest))
    size = sum(leaf.nbytes for rank in ranks for leaf in rank.leaves)
    manifest = Manifest(step, f"{step:012d}-0123abcd", 1.0, tuple(entries), size)
    (path / MANIFEST_NAME).write_bytes(manifest.encode())


def edit_rank(path: Path, step: int, edit: Callable[[RankManifest], RankManifest]) -> None:
    """Rewrite a step's rank manifest, checksums and all, as a hostile writer would."""
    old = RankManifest.decode((path / RANK).read_bytes(), path=path / RANK)
    write_manifests(path, step, [edit(old)])


def resign(path: Path, step: int) -> None:
    """Make the manifests fit the bytes that the shard file has now."""

    def edit(rank: RankManifest) -> RankManifest:
        data = (path / SHARD).read_bytes()
        entry = FileEntry(SHARD, len(data), chunk_sums(data))
        return replace(rank, files=(entry,))

    edit_rank(path, step, edit)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


@dataclass
class Held:
    """What a witness gives."""

    release: Callable[[], None]


class Witness:
    """A guard that remembers what it was told."""

    def __init__(self) -> None:
        self.suspects: list[int] = []
        self.protected: list[int] = []
        self.seen: list[int] = []

    def protect(self, step: int) -> Held:
        self.protected.append(step)
        self.seen.append(step)
        return Held(lambda: self.protected.remove(step))

    def suspect(self, step: int) -> None:
        self.suspects.append(step)


def restorer(
    root: Path,
    *,
    files: Files | None = None,
    store: Witness | None = None,
    timeout_s: float = 30.0,
    devices: Devices | None = None,
) -> Restorer:
    return Restorer(
        root,
        files=files or Files(),
        readers=2,
        timeout_s=timeout_s,
        store=store,
        devices=devices,
    )


def restore(root: Path, state: Any, **options: Any) -> RestoredStep | None:
    return restorer(root).restore(state, RestoreRequest(**options))


def small_state(seed: int = 0) -> dict[str, Any]:
    """Leaves of several dtypes and shapes, about 20 KiB, and plain values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(50, 60, generator=generator),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(7, 11, dtype=torch.float64, generator=generator),
        "count": torch.tensor(seed),
        "flags": torch.randn(77, generator=generator) > 0,
        "empty": torch.empty(0, 3),
        "complex": torch.randn(19, dtype=torch.complex64, generator=generator),
        "plain": {"lr": 0.1 + seed, "names": ["a", "b"]},
    }


def zeros_like(state: Any) -> Any:
    """The same tree with zeros in every tensor and None for plain values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros_like(value) for value in state]
    return state


def assert_same(got: Any, expected: Any) -> None:
    """Bit for bit, whatever the tree."""
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert tensor_bytes(got) == tensor_bytes(expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for left, right in zip(got, expected, strict=True):
            assert_same(left, right)
    else:
        assert got == expected


# -- file layers that misbehave ---------------------------------------------------------------------


class Unmapped(Files):
    """Files cannot be mapped: every byte comes by a read."""

    def map_private(self, fd: int, size: int) -> mmap.mmap:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


class BufferedOnly(Unmapped):
    """A filesystem without O_DIRECT, where nothing is known about the page cache."""

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return super().open_read(path)

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return 0


class Cold(Unmapped):
    """Nothing is ever in the page cache."""

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return 0


class RefusesDirectReads(Cold):
    """Takes O_DIRECT at open, and refuses the first read."""

    def __init__(self) -> None:
        self.direct: set[int] = set()

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        fd = super().open_read(path)
        if direct:
            self.direct.add(fd)
        else:
            self.direct.discard(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if fd in self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().preadv(fd, buffers, offset)


class ShortReads(Unmapped):
    """Every read gives at most `most` bytes."""

    def __init__(self, most: int, *, cached: bool) -> None:
        self._most = most
        self._cached = cached

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        first = next(view for view in map(memoryview, buffers) if len(view))
        return super().preadv(fd, [first[: self._most]], offset)

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return super().preadv_cached(fd, buffers, offset) if self._cached else 0


class HalfCached(Unmapped):
    """The page cache holds the first bytes of every range that is asked for, and never all."""

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        wanted = sum(len(memoryview(buffer)) for buffer in buffers)
        got = super().preadv_cached(fd, buffers, offset)
        return got if wanted <= 4096 else min(got, 4096)


class FailingReads(Cold):
    """Reads of files whose path contains `part` fail with an error number."""

    def __init__(self, part: str, code: int = errno.EIO) -> None:
        self._part = part
        self._code = code

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._part in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(self._code, os.strerror(self._code))
        return super().preadv(fd, buffers, offset)


class HangingReads(Cold):
    """Reads of files whose path contains `part` return only after `released`."""

    def __init__(self, part: str) -> None:
        self._part = part
        self.released = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._part in os.readlink(f"/proc/self/fd/{fd}"):
            self.released.wait(60)
        return super().preadv(fd, buffers, offset)


class Interrupting(Cold):
    """Calls `action` once, ahead of the first read of a file whose path contains `part`."""

    def __init__(self, part: str, action: Callable[[], None]) -> None:
        self._part = part
        self._action = action
        self._lock = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._part in os.readlink(f"/proc/self/fd/{fd}"):
            with self._lock:
                action, self._action = self._action, lambda: None
                action()
        return super().preadv(fd, buffers, offset)
