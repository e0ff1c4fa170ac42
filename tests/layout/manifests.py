"""Manifests to try things on, and files of them that `encode` would not write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import strategies as st

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.layout import (
    ChunkSum,
    FileEntry,
    LeafEntry,
    Manifest,
    RankEntry,
    RankManifest,
    SliceEntry,
    rank_manifest_name,
    shard_name,
)
from ckpt_core.types import Block, LeafSpec, Slice

PATH = Path("step-000000000120/manifest.json")
SUM = "0123456789abcdef"
Either = RankManifest | Manifest

RANK = RankManifest(
    rank=3,
    files=(
        FileEntry(shard_name(3, 0), 12288, (ChunkSum(8192, SUM), ChunkSum(4096, None))),
        FileEntry(shard_name(3, 1), 8192, (ChunkSum(8192, SUM),)),
    ),
    leaves=(
        LeafEntry(LeafSpec("é.weight", "float32", (4, 5)), 0, 4096, 80),
        LeafEntry(LeafSpec("scale", "complex64", ()), 0, 4176, 8),
        LeafEntry(LeafSpec("none", "int64", (0, 7)), 1, 8192, 0),
    ),
    skeleton={"a": [1, 2.5, None, True, "\ud800é"], "b": {}},
)
STEP = Manifest(
    step=120,
    attempt="000000000120-0a1b2c3d",
    created_unix_s=1_700_000_000.25,
    ranks=tuple(RankEntry(rank, rank_manifest_name(rank), 4321, SUM) for rank in range(3)),
    state_bytes=10**12,
    world_size=3,
    version=1,
)
"""Version 1 could say that several ranks had written a step, though no release did."""

RANK_2 = RankManifest(
    rank=3,
    files=(FileEntry(shard_name(3, 0), 12288, (ChunkSum(12288, SUM),)),),
    leaves=(LeafEntry(LeafSpec("rng", "uint8", (16,)), 0, 4096, 16),),
    skeleton={"rng": 1, "w": 2},
    slices=(
        SliceEntry(LeafSpec("w", "float32", (40, 50)), Slice(2048, 1024), 0, 5120),
        SliceEntry(LeafSpec("box", "int16", (8, 6)), Slice(8, 32, Block((4, 1), (4, 5))), 0, 8192),
        SliceEntry(LeafSpec("empty", "int64", (0, 7)), Slice(0, 0), 0, 12288),
    ),
    version=2,
)
STEP_2 = Manifest(
    step=120,
    attempt="000000000120-0a1b2c3d",
    created_unix_s=1_700_000_000.25,
    ranks=tuple(RankEntry(rank, rank_manifest_name(rank), 4321, SUM) for rank in (2, 3, 5)),
    state_bytes=10**12,
    world_size=8,
)
RANK_3 = RankManifest(
    rank=3,
    files=(
        FileEntry("mp_rank_00_model_states.pt", 12289, (ChunkSum(12288, SUM), ChunkSum(1, None))),
        FileEntry("höhe/layer 01.pt", 7, (ChunkSum(7, SUM),)),
    ),
    leaves=(),
    skeleton=None,
    version=3,
)
STEP_3 = Manifest(
    step=120,
    attempt="000000000120-0a1b2c3d",
    created_unix_s=1_700_000_000.25,
    ranks=tuple(RankEntry(rank, rank_manifest_name(rank), 4321, SUM) for rank in (2, 3, 5)),
    state_bytes=10**12,
    world_size=8,
    directory="global_step120",
    pointer="latest",
)
EVERY = [RANK, STEP, RANK_2, STEP_2, RANK_3, STEP_3]
NAMES = [
    *("rank", "step", "rank of version 2", "step of version 2"),
    *("rank of version 3", "manifest of version 3"),
]


def sealed(obj: Any) -> bytes:
    """`obj` as a file with the right checksum, written by other means than `encode`."""
    return resealed(obj if isinstance(obj, bytes) else json.dumps(obj)[:-1].encode())


def resealed(body: bytes) -> bytes:
    return body + b',"xxh3":"%s"}\n' % xxhash.xxh3_64_hexdigest(body).encode()


def plain(manifest: Either) -> dict[str, Any]:
    obj: dict[str, Any] = json.loads(manifest.encode())
    del obj["xxh3"]
    return obj


def refused(manifest: Either, data: bytes) -> CorruptCheckpoint:
    with pytest.raises(CorruptCheckpoint) as caught:
        type(manifest).decode(data, path=PATH)
    assert caught.value.path == PATH
    assert caught.value.expected
    assert caught.value.got
    assert str(PATH) in str(caught.value)
    assert len(str(caught.value)) < 500
    return caught.value


def edit(obj: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        obj = obj[key]
    if value is KeyError:
        del obj[place[-1]]
    else:
        obj[place[-1]] = value


def survives(manifest: Either, data: bytes) -> None:
    """Decoding `data` gives a manifest or one of our two errors."""
    try:
        decoded = type(manifest).decode(data, path=PATH)
    except (CorruptCheckpoint, UnknownFormat):
        return
    assert type(manifest).decode(decoded.encode(), path=PATH) == decoded


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
