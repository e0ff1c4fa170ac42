"""A step over all its ranks: which leaves there are, and where their bytes lie. Torch-free.

A leaf that ranks store together is one leaf, whoever wrote which part of it. Leaves that belong to one
rank alone may have the same name on every rank and are looked up by rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.layout import Effort, RankManifest, itemsize, uncovered
from ckpt_core.layout import nbytes as size_of
from ckpt_core.restore.failures import Elsewhere
from ckpt_core.restore.manifests import StepManifest
from ckpt_core.types import LeafSpec, Slice

_SHOWN = 3


class LeafPlace(NamedTuple):
    """Where a part of a leaf lies: `offset` in file number `file` of a rank; None: the whole leaf."""

    rank: int
    file: int
    offset: int
    part: Slice | None


class StoredLeaf(NamedTuple):
    """A leaf of a step: its size as a whole, and all that is stored of it in this root."""

    spec: LeafSpec
    nbytes: int
    places: list[LeafPlace]


class StepLeaves:
    """The leaves of a step.

    Attributes:
        step: its manifests.
        shared: leaves that ranks store together, by name. All leaves of a step that one rank saved are
            among them: whoever restores it takes the same values.
        private: rank -> its own leaves, by name.
    """

    def __init__(self, step: StepManifest) -> None:
        """
        Raises:
            CorruptCheckpoint: ranks contradict each other about a leaf.
        """
        self.step = step
        self.shared: dict[str, StoredLeaf] = {}
        self.private: dict[int, dict[str, StoredLeaf]] = {}
        self._effort = Effort()
        self._gaps: dict[str, str | None] = {}
        alone = step.manifest.world_size == 1
        for rank in step.ranks:
            own = _own(rank)
            self.private[rank.rank] = {} if alone else own
            if alone:
                self.shared = own
            self._add_slices(rank)
        for number, own in self.private.items():
            for name in own.keys() & self.shared.keys():
                where = f"one of rank {number} alone", f"one that rank {self._any(name)} shares"
                raise self.corrupt(name, *where)

    @property
    def is_partial(self) -> bool:
        """Whether this root lacks what other ranks wrote: it is the root of one node."""
        return len(self.step.ranks) < self.step.manifest.world_size

    def owner(self, rank: int) -> RankManifest:
        """Whose skeleton and private leaves `rank` takes: its own, or one that is there for it."""
        found = {manifest.rank: manifest for manifest in self.step.ranks}
        return found.get(rank) or self.step.ranks[rank % len(self.step.ranks)]

    def of(
        self, owner: RankManifest, names: Collection[str], *, whole: bool = False
    ) -> Mapping[str, StoredLeaf]:
        """The leaves that a skeleton with these names is about.

        Args:
            whole: in the root of one node too, each must be there to its last byte. (Elsewhere it must be,
                before anybody allocates by its shape.)

        Raises:
            CorruptCheckpoint: no rank has stored a byte that one of them consists of.
            RestoreError: this is the root of one node, and those bytes lie in the root of another.
        """
        if self.step.manifest.world_size == 1:
            return self.shared
        leaves = {name: leaf for name, leaf in self.shared.items() if name in names}
        own = self.private[owner.rank]
        leaves.update({name: leaf for name, leaf in own.items() if name in names})
        if self.is_partial:
            lost = [name for name in names if name not in leaves]
            if whole:
                lost += [name for name, leaf in leaves.items() if self.gap(leaf) is not None]
            if lost:
                raise self.elsewhere(lost)
            return leaves
        for name, leaf in leaves.items():
            gap = self.gap(leaf)
            if gap is not None:
                raise self.lacks(name, gap)
        return leaves

    def gap(self, leaf: StoredLeaf) -> str | None:
        """What of a leaf is stored nowhere in this root, in words; None when all of it is here."""
        parts = [place.part for place in leaf.places if place.part is not None]
        if len(parts) < len(leaf.places):
            return None
        name, unit = leaf.spec.name, itemsize(leaf.spec.dtype)
        if name not in self._gaps:
            self._gaps[name] = uncovered(leaf.spec.shape, unit, parts, effort=self._effort)
        return self._gaps[name]

    def elsewhere(self, names: Collection[str]) -> RestoreError:
        """The error for leaves that lie, in part or whole, in the roots of other nodes."""
        ranks = ", ".join(str(rank.rank) for rank in self.step.ranks)
        return Elsewhere(
            f"{self.step.path} holds what ranks {ranks} of {self.step.manifest.world_size} wrote, and "
            f"needed parts of {first_few(sorted(names))} were written by other ranks, to another root: "
            "restore on the nodes and with the number of ranks that saved it, or from a root that all of "
            "them share",
            step=self.step.manifest.step,
            path=self.step.path,
        )

    def lacks(self, name: str, gap: str) -> CorruptCheckpoint:
        """The error for a leaf that is not stored to its last byte."""
        return self.corrupt(name, "every byte of it", f"nothing of {gap}")

    def corrupt(self, name: str, expected: str, got: str) -> CorruptCheckpoint:
        """The error for a leaf whose parts do not make a leaf."""
        step = self.step
        return CorruptCheckpoint(
            f"{step.path}: leaf {name[:60]!r}: expected {expected}, got {got}",
            path=step.path,
            expected=expected,
            got=got,
            step=step.manifest.step,
        )

    def _add_slices(self, rank: RankManifest) -> None:
        for entry in rank.slices:
            spec = entry.spec
            leaf = self.shared.get(spec.name)
            if leaf is None:
                leaf = self.shared[spec.name] = StoredLeaf(spec, size_of(spec), [])
            elif leaf.spec != spec:
                before = f"{leaf.spec.dtype} {list(leaf.spec.shape)} (rank {leaf.places[0].rank})"
                here = f"{spec.dtype} {list(spec.shape)} (rank {rank.rank})"
                raise self.corrupt(spec.name, before, here)
            leaf.places.append(LeafPlace(rank.rank, entry.file, entry.offset, entry.slice))

    def _any(self, name: str) -> int:
        return self.shared[name].places[0].rank


def first_few(names: Sequence[str]) -> str:
    """Names for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _own(rank: RankManifest) -> dict[str, StoredLeaf]:
    number = rank.rank
    return {
        leaf.spec.name: StoredLeaf(
            leaf.spec, leaf.nbytes, [LeafPlace(number, leaf.file, leaf.offset, None)]
        )
        for leaf in rank.leaves
    }
