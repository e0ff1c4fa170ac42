"""What this rank has put into its shard files, for the manifests and for the vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

from ckpt_core.coordination import Reference
from ckpt_core.layout import FileEntry, LeafEntry, RankText, SliceEntry
from ckpt_core.share import Audit, Cut, Evidence, Placed, Share
from ckpt_core.state import Skeleton


class Stored:
    """Parts of leaves in shard files of this rank, of one save or of all that have one structure.

    What follows from them is worked out once, on a background thread.

    Args:
        placed: each part of a leaf, its shard file and its place there.
    """

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = placed
        self._text: tuple[object, RankText] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum([place.extent.nbytes for place in self._placed])

    def manifest(
        self, rank: int, files: Sequence[FileEntry], skeleton: str, *, version: int
    ) -> bytes:
        """The rank manifest.

        Raises:
            ConfigError: it breaks the format's rules.
        """
        key, known = ([file.nbytes for file in files], version), self._text
        if known is None or known[0] != key:
            known = self._text = key, RankText(partial(_entries, self._placed), *key)
        return known[1].encode(rank, files, skeleton)


@dataclass(frozen=True)
class Contents:
    """What this rank stores of a checkpoint, beside the bytes of its shard files.

    Attributes:
        stored: the parts of leaves in its files.
        skeleton: everything that is not a tensor; None when it is in the files.
        plans: hashes of what must be equal on all ranks; none in a job of one.
        reference: what this rank has seen of what all ranks must have equal; None in a job of one.
        named_bytes: length of the named files, which hold no leaves.
        shares: of the files of leaves.
    """

    stored: Stored
    skeleton: Skeleton | None
    plans: tuple[str, ...] = ()
    reference: Reference | None = None
    named_bytes: int = 0
    shares: tuple[Share, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of all parts, or of the named files."""
        return self.stored.nbytes + self.named_bytes

    @property
    def cut(self) -> Cut | None:
        """How distributed leaves are cut; None: there are none. They are in one file, since `begin` takes
        none of them.
        """
        return next(filter(None, [share.cut for share in self.shares]), None)

    @classmethod
    def of_leaves(
        cls,
        stored: Stored,
        skeleton: Skeleton,
        shares: Sequence[Share],
        audits: Sequence[Audit],
    ) -> Self:
        """Of a step: one share and one audit for each file."""
        plans = tuple([share.plan for share in shares if share.plan])
        reference = Evidence(tuple(audits)) if plans else None
        return cls(stored, skeleton, plans, reference, shares=tuple(shares))


def _entries(
    placed: Sequence[Placed],
) -> tuple[Sequence[LeafEntry], Sequence[SliceEntry]]:
    """The leaves that lie whole in its files, and the parts of others, as the rank manifest has them."""
    leaves, slices = [], []
    for place in placed:
        part, extent = place.part, place.extent
        if part.whole is None or part.slice is None:
            leaves.append(LeafEntry(part.stored, place.file, extent.offset, extent.nbytes))
        else:
            slices.append(SliceEntry(part.whole, part.slice, place.file, extent.offset))
    return leaves, slices
