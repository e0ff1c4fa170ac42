"""How parity lies on a disk: a directory of files (format version 3) for each step that it is of.

    <dir>/<run>/parity-of-node-00002/           what one node keeps: a root as any other
      parity-000000000100/
        stripe-00                               the parity of a stripe, for each that the node keeps
        sums-00                                 of the pieces of all its blocks: the data's, then its own
        parts                                   the manifests of all nodes of the group
        rank-00000.json                         names and sums of these, and the description, as its skeleton
        manifest.json                           last: with it, the parity is there

Its attempt is made of that of the step and of the group. So parity of another save of the step, or of other
nodes, is never taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import xxhash

from ckpt_core.errors import CkptError, CorruptCheckpoint, NotCommitted, UnknownFormat
from ckpt_core.layout import Manifest, RankManifest, rank_manifest_name
from ckpt_core.levels.far.door import Copy, Readable
from ckpt_core.levels.far.opening import ROOT_PREFIX
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.parts import Part, wrong
from ckpt_core.types import parse_step_dir

VERSION = 1
PIECE_BYTES = 1 << 20
"""Of a block: what is read, compared and rebuilt at a time."""

RANKS = rank_manifest_name(0)
PARTS = "parts"
_SUM_BYTES = 8
_PREFIX = "parity-"
_STEP_PREFIX = "step-"


def directory_name(step: int) -> str:
    """What parity of a step is called."""
    return f"{_PREFIX}{step:012d}"


def step_of(directory: str) -> int | None:
    """The step that a directory is parity of; None: of none."""
    prefix, _, number = directory.rpartition("-")
    return parse_step_dir(_STEP_PREFIX + number) if prefix + "-" == _PREFIX else None


def root_key(run: str, part: str) -> str:
    """Where a node shows its root to the others."""
    return f"{run}/{ROOT_PREFIX}{part}"


def parity_key(run: str, part: str) -> str:
    """Where a node keeps parity, below its `dir`, and shows it."""
    return f"{run}/parity-of-{part}"


@dataclass(frozen=True)
class Group:
    """Nodes that keep parity of one another.

    Attributes:
        shape: how many of what.
        parts: the names of their parts, in the order of the group.
    """

    shape: Shape
    parts: tuple[str, ...]

    def copy(self, save: Copy) -> Copy:
        """The parity of a save."""
        told = [VERSION, save.attempt, self.shape.k, self.shape.m, *self.parts]
        digits = xxhash.xxh3_64_hexdigest(json.dumps(told).encode())[:8]
        name = directory_name(save.step)
        return Copy(save.step, f"{save.attempt.partition('-')[0]}-{digits}", name)


@dataclass(frozen=True)
class Description:
    """What a directory of parity is of.

    Attributes:
        attempt: of the save.
        k, m, parts: the group.
        node: number in the group of the one that keeps this.
        block_bytes: length of each stripe's blocks.
        piece_bytes: of which there is a sum each.
        cuts: of each part, where its k blocks begin, and its end.
        index: what `parts` has, one after the other: part, file, length.
    """

    attempt: str
    k: int
    m: int
    parts: tuple[str, ...]
    node: int
    block_bytes: int
    piece_bytes: int
    cuts: tuple[tuple[int, ...], ...]
    index: tuple[tuple[str, str, int], ...]

    @property
    def group(self) -> Group:
        """Whose it is."""
        return Group(Shape(self.k, self.m), self.parts)

    @property
    def save(self) -> Copy:
        """What it is of."""
        return Copy.of(self.attempt)

    @property
    def pieces(self) -> int:
        """How many a block has."""
        return -(-self.block_bytes // self.piece_bytes)

    def piece(self, number: int) -> tuple[int, int]:
        """Where a piece of a block begins and ends."""
        begin = number * self.piece_bytes
        return begin, min(begin + self.piece_bytes, self.block_bytes)

    def block(self, node: int, stripe: int) -> tuple[int, int]:
        """Where the block of a node in a stripe begins and ends in its part: behind that are zeros."""
        number = self.group.shape.covering(node).index(stripe)
        return self.cuts[node][number], self.cuts[node][number + 1]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {"parity": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, obj: Any, *, path: Path) -> Self:
        """As `to_json` gave it, and consistent.

        Raises:
            UnknownFormat: of a newer release.
            CorruptCheckpoint: it is nothing of the kind.
        """
        if isinstance(obj, dict) and isinstance(obj.get("parity"), int) and obj["parity"] > VERSION:
            text = f"{path}: parity of version {obj['parity']}, and {VERSION} is known"
            raise UnknownFormat(text, path=path, version=obj["parity"])
        try:
            found = cls(
                **{
                    **{name: obj[name] for name in cls.__dataclass_fields__},
                    "parts": tuple(obj["parts"]),
                    "cuts": tuple(map(tuple, obj["cuts"])),
                    "index": tuple((str(a), str(b), int(c)) for a, b, c in obj["index"]),
                }
            )
            shape = Shape.parse(f"{found.k}+{found.m}")
            whole = len(found.parts) == len(found.cuts) == shape.nodes > found.node >= 0
            if whole and found.piece_bytes > 0 and all(map(found._fits, found.cuts)):
                return found
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        raise wrong(path, "the description of parity", "something else", 0)

    def _fits(self, cuts: Sequence[int]) -> bool:
        sizes = [end - begin for begin, end in pairwise(cuts)]
        return len(sizes) == self.k and all(0 <= size <= self.block_bytes for size in sizes)


def stripe_name(stripe: int) -> str:
    """The file with its parity."""
    return f"stripe-{stripe:02d}"


def sums_name(stripe: int) -> str:
    """The file with the sums of its blocks."""
    return f"sums-{stripe:02d}"


def packed(sums: Sequence[Sequence[int]]) -> bytes:
    """The sums of a stripe, for each block those of its pieces."""
    return b"".join(one.to_bytes(_SUM_BYTES, "little") for row in sums for one in row)


class Sums:
    """The sums of a stripe, read."""

    def __init__(self, data: bytes, *, pieces: int) -> None:
        self._data, self._pieces = data, pieces

    def of(self, block: int, piece: int) -> int:
        """That of a piece; `block`: 0 to k-1 for data, k for the parity that lies with them."""
        at = (block * self._pieces + piece) * _SUM_BYTES
        return int.from_bytes(self._data[at : at + _SUM_BYTES], "little")


@dataclass(frozen=True)
class Kept:
    """A directory of parity, whose manifests have been read and found right.

    Attributes:
        far: where it lies.
        copy: its name and attempt there.
        about: what it says of itself.
        ranks: names and sums of its files.
    """

    far: Readable
    copy: Copy
    about: Description
    ranks: RankManifest

    @classmethod
    def read(cls, far: Readable, copy: Copy) -> Self:
        """One that is there.

        Raises:
            NotCommitted: it is not (any more).
            CorruptCheckpoint, UnknownFormat: it is damaged, or of a newer release.
            Away: it cannot be read now.
        """
        path = Path(far.url) / copy.target
        raw = far.manifest(copy.target)
        manifest = None if raw is None else Manifest.decode(raw, path=path / "manifest.json")
        if manifest is None or manifest.attempt != copy.attempt:
            raise NotCommitted(f"{path} is not there any more", step=copy.step, path=path)
        row = manifest.ranks[0]
        data = far.read(copy, row.file, row.nbytes)
        if (found := xxhash.xxh3_64_hexdigest(data)) != row.xxh3:
            raise wrong(path / row.file, f"xxh3 {row.xxh3}", f"xxh3 {found}", copy.step)
        ranks = RankManifest.decode(data, path=path / row.file)
        about = Description.from_json(ranks.skeleton, path=path / row.file)
        if about.group.copy(about.save) != copy:
            raise wrong(path, f"parity {copy.attempt}", f"that of {about.attempt}", copy.step)
        return cls(far, copy, about, ranks)

    def sums(self, stripe: int) -> Sums:
        """Those of a stripe that it keeps. Raises CorruptCheckpoint, Away."""
        data = self._small(sums_name(stripe))
        nbytes = (self.about.k + 1) * self.about.pieces * _SUM_BYTES
        if len(data) != nbytes:
            path = Path(self.far.url) / self.copy.target / sums_name(stripe)
            raise wrong(path, f"{nbytes} bytes", f"{len(data)} bytes", self.copy.step)
        return Sums(data, pieces=self.about.pieces)

    def part(self, name: str) -> Part:
        """The manifests of a node of the group. Raises CorruptCheckpoint, UnknownFormat, Away."""
        found = {file: data for part, file, data in self._manifests() if part == name}
        return Part.of(found.pop("manifest.json"), found, path=Path(self.far.url, name))

    def _manifests(self) -> Iterator[tuple[str, str, bytes]]:
        data, at = self._small(PARTS), 0
        for part, file, nbytes in self.about.index:
            yield part, file, data[at : at + nbytes]
            at += nbytes

    def _small(self, name: str) -> bytes:
        entry = next((one for one in self.ranks.files if one.name == name), None)
        path = Path(self.far.url) / self.copy.target / name
        if entry is None:
            raise wrong(path, "a file", "nothing of that name", self.copy.step)
        data, at = self.far.read(self.copy, name, entry.nbytes), 0
        for chunk in entry.chunks:
            found = xxhash.xxh3_64_hexdigest(data[at : at + chunk.nbytes])
            if found != chunk.xxh3:
                raise wrong(path, f"xxh3 {chunk.xxh3}", f"xxh3 {found}", self.copy.step)
            at += chunk.nbytes
        return data


def groups_kept(place: Path) -> set[tuple[str, ...]]:
    """Of which groups a directory of this machine keeps parity. Never raises."""
    found: set[tuple[str, ...]] = set()
    for path in place.glob(f"{_PREFIX}*/{RANKS}"):
        with suppress(OSError, CkptError):
            ranks = RankManifest.decode(path.read_bytes(), path=path)
            found.add(Description.from_json(ranks.skeleton, path=path).parts)
    return found


def damaged(error: Exception) -> bool:
    """Whether it says that something there is not what was written."""
    return isinstance(error, CorruptCheckpoint | UnknownFormat | NotCommitted)
