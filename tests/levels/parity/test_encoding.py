"""Parity as it is made: blocks of all nodes are read at once, at the pace of one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.levels import Away
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.parity.encoding import How, Sources, encode
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.parts import read_part
from ckpt_core.store import step_path
from tests.levels.making import CHUNK_BYTES
from tests.levels.parity.clusters import PIECE_BYTES, STEP, Cluster, contents, flip
from tests.store.harness import QuickFiles

_SOON_S = 60.0


class Together(DirectoryFar):
    """Begins to give a block once as many are asked for as there are in a stripe."""

    begun: threading.Barrier

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        self.begun.wait(_SOON_S)
        return super().read_blocks(copy, name, offset, nbytes)


def sources_of(cluster: Cluster, kind: type[DirectoryFar]) -> Sources:
    fars = [kind(cluster.root(n), files=QuickFiles()) for n in range(cluster.shape.nodes)]
    parts = [part for far in fars if (part := read_part(far, cluster.save)) is not None]
    return Sources(fars, parts)


def make(cluster: Cluster, sources: Sources, how: How) -> None:
    far = DirectoryFar(cluster.kept(0), files=QuickFiles())
    encode(cluster.group, 0, cluster.save, sources, far, how)


def test_the_blocks_of_a_stripe_are_read_at_the_same_time(tmp_path: Path) -> None:
    shape = Shape(4, 1)
    cluster = Cluster(tmp_path, shape, sizes=[8 * CHUNK_BYTES] * shape.nodes)
    cluster.encode(0)
    (before,) = [data for name, data in contents(kept(cluster)).items() if "stripe" in name]
    shutil.rmtree(cluster.kept(0))
    Together.begun = threading.Barrier(shape.k)
    make(cluster, sources_of(cluster, Together), How(piece_bytes=PIECE_BYTES))
    assert contents(kept(cluster))["stripe-00"] == before


def kept(cluster: Cluster) -> Path:
    return cluster.kept(0) / f"parity-{STEP:012d}"


def test_no_two_of_them_ask_for_the_pace_at_once_and_all_is_told(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1), sizes=[8 * CHUNK_BYTES] * 3)
    asking, told = threading.Lock(), [0]

    def let_through(nbytes: int) -> None:
        assert asking.acquire(blocking=False)
        asking.release()

    make(cluster, sources_of(cluster, DirectoryFar), How(let_through, told.append))
    assert told == sorted(told) and told[-1] == 8 * CHUNK_BYTES


def test_what_ends_one_of_them_ends_it_all_and_nothing_can_be_seen(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1), sizes=[64 * CHUNK_BYTES] * 3)
    how = How(piece_bytes=PIECE_BYTES)
    flip(step_path(cluster.root(2), STEP) / "shard-00002-0.safetensors", 5 * CHUNK_BYTES)
    with pytest.raises(CorruptCheckpoint, match="shard-00002"):
        make(cluster, sources_of(cluster, DirectoryFar), how)

    def ends(nbytes: int) -> None:
        raise Away("told to end")

    with pytest.raises(Away, match="told to end"):
        make(cluster, sources_of(cluster, DirectoryFar), How(ends, piece_bytes=PIECE_BYTES))
    assert not kept(cluster).exists()
    assert not [one for one in threading.enumerate() if one.name.startswith("ckpt-parity")]
