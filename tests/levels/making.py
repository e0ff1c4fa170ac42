"""Steps small enough to send by the thousand, in the true format, and a look at what has come of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import xxhash

from ckpt_core.errors import NotCommitted
from ckpt_core.layout import (
    ChunkSum,
    FileEntry,
    Manifest,
    RankEntry,
    RankManifest,
    rank_manifest_name,
    shard_name,
)
from ckpt_core.levels.agent.pace import BLOCK_BYTES
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.store import StepStore, committed_steps, step_path
from ckpt_core.system.files import Files
from tests.store.harness import QuickFiles

CHUNK_BYTES = 4096
WORLD = 1


def make_store(
    root: Path, *, keep_last: int | None = None, files: Files | None = None
) -> StepStore:
    """An open store of a first root."""
    store = StepStore(
        root, files=files or QuickFiles(), keep_last=keep_last, keep_every=None, spare_slots=0
    )
    store.open()
    return store


def save(
    store: StepStore,
    step: int,
    *,
    mark: int = 0,
    nbytes: int = 5 * CHUNK_BYTES,
    ranks: Sequence[int] = (0,),
    world: int = WORLD,
    attempt: str | None = None,
    sums: bool = True,
) -> str:
    """Commit a step whose bytes `step` and `mark` tell; its attempt."""
    begun = store.begin(step, attempt)
    rows, files = [], QuickFiles()
    for rank in ranks:
        data = bytes_of(step, mark, rank, nbytes)
        files.write_new(begun.path / shard_name(rank, 0), data)
        entry = FileEntry(shard_name(rank, 0), nbytes, chunks_of(data, sums=sums))
        text = RankManifest(rank, (entry,), (), None, version=1 if world == 1 else 2).encode()
        files.write_new(begun.path / rank_manifest_name(rank), text)
        rows.append(
            RankEntry(rank, rank_manifest_name(rank), len(text), xxhash.xxh3_64_hexdigest(text))
        )
    manifest = Manifest(step, begun.id, float(mark), tuple(rows), 0, world)
    files.write_new(begun.path / "manifest.json", manifest.encode())
    store.publish(begun)
    return begun.id


def bytes_of(step: int, mark: int, rank: int, nbytes: int) -> bytes:
    """What a rank has saved."""
    return random.Random(f"{step} {mark} {rank}").randbytes(nbytes)


def chunks_of(data: bytes, *, sums: bool = True) -> tuple[ChunkSum, ...]:
    """Its pieces."""
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return tuple(
        ChunkSum(len(piece), xxhash.xxh3_64_hexdigest(piece) if sums else None) for piece in pieces
    )


def read_step(root: Path, step: int) -> int:
    """The mark of a step, after a look at every byte and every name of it."""
    with OpenSave(step_path(root, step), files=Files()) as found:
        assert found.is_whole and found.manifest.step == step
        names = {"manifest.json", *found.ranks}
        mark = int(found.manifest.created_unix_s)
        for entry in found.entries:
            names.add(entry.name)
            data = b"".join(map(bytes, found.blocks(entry, BLOCK_BYTES)))
            rank = int(entry.name.split("-")[1])
            assert data == bytes_of(step, mark, rank, entry.nbytes)
    assert {path.name for path in step_path(root, step).iterdir()} == names
    return mark


def look(root: Path) -> dict[int, int]:
    """Marks of all steps that a reader sees, each whole."""
    found = {}
    for step in committed_steps(root):
        try:
            found[step] = read_step(root, step)
        except (NotCommitted, FileNotFoundError):
            assert not step_path(root, step).exists(), (
                "retired while it was looked at, or not whole"
            )
    return found
