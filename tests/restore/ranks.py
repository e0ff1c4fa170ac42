"""Steps of several ranks written by hand, and ranks that restore in the threads of one process.

As in harness.py: what is written is what docs/format.md says, and nothing of the engine takes part.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt_core.errors import CoordinationTimeout
from ckpt_core.layout import (
    MANIFEST_NAME,
    FileEntry,
    LeafEntry,
    Manifest,
    RankEntry,
    RankManifest,
    ShardLayout,
    SliceEntry,
    itemsize,
    nbytes,
    rank_manifest_name,
    shard_name,
    share_leaves,
)
from ckpt_core.restore import RestoredStep, Restorer, RestoreRequest, RestoreWarning
from ckpt_core.state import Leaf, flatten
from ckpt_core.system.files import Files
from ckpt_core.types import Block, LeafSpec, RankInfo, Slice, step_dir_name
from tests.restore.harness import Recipe, Witness, chunk_sums, tensor_bytes

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """A training job whose ranks save together.

    Attributes:
        world: how many ranks.
        replicated: part of the state that is equal on all ranks.
        private: rank -> what is its own.
        boxed: tensors that are dealt out in boxes, by name.
        dim: along which dimension they are cut.
        attempt: last part of the attempt id.
        chunk_bytes: length of each checksum chunk.
    """

    world: int
    replicated: Any = field(default_factory=dict)
    private: Callable[[int], Any] = lambda rank: {}
    boxed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dim: int = 0
    attempt: str = "0123abcd"
    chunk_bytes: int = 4096

    def state(self, rank: int) -> dict[str, Any]:
        """The state of one rank, with every boxed tensor whole."""
        return {"shared": self.replicated, "own": self.private(rank), "boxed": dict(self.boxed)}


def boxes(shape: Sequence[int], world: int, dim: int = 0) -> list[Block]:
    """How `torch.chunk` cuts a tensor among ranks; the last ones may be empty."""
    per = math.ceil(shape[dim] / world)
    cut = []
    for rank in range(world):
        begin = min(rank * per, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = begin, min(per, shape[dim] - begin)
        cut.append(Block(tuple(offsets), tuple(sizes)))
    return cut


def part_of(tensor: torch.Tensor, block: Block | None) -> torch.Tensor:
    """The box of a tensor."""
    if block is None:
        return tensor
    for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def write_ranks(root: Path, step: int, job: Job, *, members: Sequence[int] | None = None) -> Path:
    """Write a committed step of the ranks `members` (None: all), which share `root`; its directory."""
    members = list(range(job.world)) if members is None else list(members)
    path = root / step_dir_name(step)
    path.mkdir(parents=True)
    ranks = [_write_rank(path, job, members, rank) for rank in members]
    write_all(path, step, job, ranks)
    return path


def write_all(path: Path, step: int, job: Job, ranks: Sequence[RankManifest]) -> None:
    """The manifests of a step, whatever they say."""
    rows = []
    for rank in ranks:
        data, name = rank.encode(), rank_manifest_name(rank.rank)
        (path / name).write_bytes(data)
        rows.append(RankEntry(rank.rank, name, len(data), xxhash.xxh3_64_hexdigest(data)))
    size = sum(leaf.nbytes for rank in ranks for leaf in rank.leaves)
    size += sum(entry.slice.nbytes for rank in ranks for entry in rank.slices)
    attempt = f"{step:012d}-{job.attempt}"
    manifest = Manifest(step, attempt, 1.0, tuple(rows), size, world_size=job.world)
    (path / MANIFEST_NAME).write_bytes(manifest.encode())


def edit_ranks(
    path: Path, step: int, job: Job, edit: Callable[[RankManifest], RankManifest]
) -> None:
    """Rewrite the rank manifests of a step, checksums and all, as a hostile writer would."""
    names = sorted(path.glob("rank-*.json"))
    old = [RankManifest.decode(name.read_bytes(), path=name) for name in names]
    write_all(path, step, job, [edit(rank) for rank in old])


def _write_rank(path: Path, job: Job, members: Sequence[int], rank: int) -> RankManifest:
    flat = flatten(job.state(rank), eager_leaf_bytes=256)
    parts = _parts(flat.leaves, job, members, rank)
    # Empty ones first, where every dtype is aligned.
    specs = sorted([spec for _, spec, _, _ in parts], key=lambda spec: nbytes(spec) > 0)
    layout = ShardLayout.plan([], specs)
    data = bytearray(layout.file_bytes)
    data[: len(layout.header)] = layout.header
    offsets = {extent.name: extent.offset for extent in layout.extents}
    leaves, slices = [], []
    for leaf, spec, part, content in parts:
        offset = offsets[spec.name]
        data[offset : offset + len(content)] = content
        if part is None:
            leaves.append(LeafEntry(leaf.spec, 0, offset, len(content)))
        else:
            slices.append(SliceEntry(leaf.spec, part, 0, offset))
    name = shard_name(rank, 0)
    (path / name).write_bytes(data)
    sums = chunk_sums(bytes(data), Recipe(chunk_bytes=job.chunk_bytes))
    entry = FileEntry(name, len(data), sums)
    skeleton = flat.skeleton.to_json()
    return RankManifest(rank, (entry,), tuple(leaves), skeleton, tuple(slices), version=2)


def _parts(
    leaves: Sequence[Leaf], job: Job, members: Sequence[int], rank: int
) -> list[tuple[Leaf, LeafSpec, Slice | None, bytes]]:
    """What a rank stores: leaf, what the header says of it, which part, and the bytes."""
    replicated = [leaf for leaf in leaves if leaf.spec.name.startswith("shared")]
    sizes = [(nbytes(leaf.spec), itemsize(leaf.spec.dtype)) for leaf in replicated]
    shares = share_leaves(sizes, members=len(members), member=members.index(rank))
    parts: list[tuple[Leaf, LeafSpec, Slice | None, bytes]] = []
    for leaf, share in zip(replicated, shares, strict=True):
        if share is not None:
            begin, size = share
            content = tensor_bytes(leaf.tensor)[begin : begin + size]
            parts.append(_sliced(leaf, Slice(begin, size), content))
    for leaf in leaves:
        if leaf.spec.name.startswith("own"):
            parts.append((leaf, leaf.spec, None, tensor_bytes(leaf.tensor)))
        elif leaf.spec.name.startswith("boxed"):
            block = boxes(leaf.spec.shape, job.world, job.dim)[rank]
            content = tensor_bytes(part_of(leaf.tensor, block))
            parts.append(_sliced(leaf, Slice(0, len(content), block), content))
    return parts


def _sliced(leaf: Leaf, part: Slice, content: bytes) -> tuple[Leaf, LeafSpec, Slice | None, bytes]:
    spec = leaf.spec
    if part.nbytes != nbytes(spec):
        spec = replace(spec, shape=(part.nbytes // itemsize(spec.dtype),))
    return leaf, spec, part, content


# -- ranks in threads -------------------------------------------------------------------------------


class Crew:
    """The coordination of ranks that are threads of this process; counts what they ask of it."""

    def __init__(self, world: int, nodes: Sequence[Sequence[int]] | None = None) -> None:
        self.world = world
        self.nodes = [list(range(world))] if nodes is None else nodes
        self.calls: list[Counter[str]] = [Counter() for _ in range(world)]
        self.drawn = [0] * world
        self._changed = threading.Condition()
        self._said: dict[tuple[str, int], dict[int, Any]] = {}

    def member(self, rank: int) -> CrewMember:
        group = next(tuple(node) for node in self.nodes if rank in node)
        return CrewMember(self, RankInfo(rank, self.world, group))

    def gather(self, rank: int, topic: str, value: Any, timeout_s: float) -> tuple[Any, ...]:
        with self._changed:
            name, _, call = topic.partition("/")
            key = f"{name}/{call}", self.calls[rank][name]
            self.calls[rank][name] += 1
            said = self._said.setdefault(key, {})
            said[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(said) == self.world, timeout_s):
                silent = sorted(set(range(self.world)) - set(said))
                raise CoordinationTimeout(f"{topic}: ranks {silent} are silent")
            return tuple(said[other] for other in range(self.world))


@dataclass(frozen=True)
class CrewMember:
    """One rank of a Crew; only what a restore asks for."""

    crew: Crew
    info: RankInfo

    def gather(self, topic: str, value: Any, timeout_s: float) -> tuple[Any, ...]:
        return self.crew.gather(self.info.rank, topic, value, timeout_s)

    def call_id(self) -> str:
        self.crew.drawn[self.info.rank] += 1
        return str(self.crew.drawn[self.info.rank])

    def leave(self, call: str, mine: Any, others: Any) -> None:
        """Who raises has told, or all do."""

    def count_anew(self, word: str) -> None:
        """Nobody saves here."""


@dataclass
class Outcomes:
    """What came of a restore on each rank."""

    results: list[Any]
    texts: list[str]
    calls: list[Counter[str]]
    witnesses: list[Witness]

    def steps(self) -> list[int]:
        """The restored step of each rank; all ranks have restored one."""
        for result in self.results:
            if isinstance(result, BaseException):
                raise result
        return [result.step for result in self.results]


@dataclass(frozen=True)
class Ranks:
    """Ranks that restore together.

    Attributes:
        roots: the root of each.
        nodes: which of them share a root; None: all.
        files: rank -> the file layer that it reads through.
        equipped: what else the Restorer of a rank gets.
    """

    roots: Sequence[Path]
    nodes: Sequence[Sequence[int]] | None = None
    files: Mapping[int, Files] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    equipped: Callable[[RankInfo], Mapping[str, Any]] = lambda info: {}

    def restore(self, lives: Sequence[Any], **options: Any) -> Outcomes:
        """Restore on every rank at once, and be sure that all of them asked the others equally often."""
        crew = Crew(len(self.roots), self.nodes)
        results: list[Any] = [None] * crew.world
        witnesses = [Witness() for _ in self.roots]

        def work(rank: int) -> None:
            own = options.get("each", {}).get(rank, {})
            common = {key: value for key, value in options.items() if key != "each"}
            try:
                member = crew.member(rank)
                restorer = Restorer(
                    self.roots[rank],
                    files=self.files.get(rank, Files()),
                    readers=2,
                    timeout_s=self.timeout_s,
                    coordination=member,  # type: ignore[arg-type]
                    **{"store": witnesses[rank], **self.equipped(member.info)},
                )
                results[rank] = restorer.restore(lives[rank], RestoreRequest(**(common | own)))
            except BaseException as exc:
                results[rank] = exc

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(crew.world)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * TIMEOUT_S)
                assert not thread.is_alive(), "a rank hangs"
        assert all(issubclass(item.category, RestoreWarning) for item in caught)
        assert all(calls == crew.calls[0] for calls in crew.calls)
        texts = [str(item.message) for item in caught]
        return Outcomes(results, texts, crew.calls, witnesses)


def restored(outcomes: Outcomes, rank: int) -> RestoredStep:
    """The result of one rank, which has restored a step."""
    result = outcomes.results[rank]
    assert isinstance(result, RestoredStep), result
    return result


# -- what ought to be read --------------------------------------------------------------------------


def chunk_bytes_of(path: Path, wanted: Mapping[str, Block | None], private: int | None) -> int:
    """Bytes of the checksum chunks that hold anything of the wanted boxes, found element by element.

    Args:
        wanted: leaf name -> its box, None for the whole leaf.
        private: the rank whose private leaves are wanted too.
    """
    total = 0
    for name in sorted(path.glob("rank-*.json")):
        rank = RankManifest.decode(name.read_bytes(), path=name)
        (file,) = rank.files
        hit = torch.zeros(file.nbytes, dtype=torch.bool)
        for entry in rank.slices:
            if entry.spec.name in wanted:
                unit = itemsize(entry.spec.dtype)
                mask = _stored_and_wanted(entry, wanted[entry.spec.name])
                size = entry.slice.nbytes
                hit[entry.offset : entry.offset + size] |= mask.repeat_interleave(unit)
        for leaf in rank.leaves:
            if rank.rank == private:
                hit[leaf.offset : leaf.offset + leaf.nbytes] = True
        position = 0
        for chunk in file.chunks:
            if hit[position : position + chunk.nbytes].any():
                total += chunk.nbytes
            position += chunk.nbytes
    return total


def _stored_and_wanted(entry: SliceEntry, block: Block | None) -> torch.Tensor:
    """For each element of a slice, whether the wanted box holds it."""
    numbers = torch.arange(math.prod(entry.spec.shape)).view(entry.spec.shape)
    unit = itemsize(entry.spec.dtype)
    begin, count = entry.slice.begin // unit, entry.slice.nbytes // unit
    mine = part_of(numbers, entry.slice.block).reshape(-1)[begin : begin + count]
    return torch.isin(mine, part_of(numbers, block).reshape(-1))
