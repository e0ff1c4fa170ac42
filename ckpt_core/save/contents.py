"""What this rank has put into its shard files, for the manifests and for the vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ckpt_core.coordination import Reference
from ckpt_core.layout import LeafEntry, SliceEntry
from ckpt_core.share import Audit, Evidence, Placed, Share
from ckpt_core.state import Skeleton


@dataclass(frozen=True)
class Contents:
    """What this rank stores of a checkpoint, beside the bytes of its shard files.

    Attributes:
        placed: each part of a leaf, its shard file and its place there.
        skeleton: everything that is not a tensor; None when it is in the files.
        plans: hashes of what must be equal on all ranks; none in a job of one.
        reference: what this rank has seen of what all ranks must have equal; None in a job of one.
        named_bytes: length of the named files, which hold no leaves.
    """

    placed: tuple[Placed, ...]
    skeleton: Skeleton | None
    plans: tuple[str, ...] = ()
    reference: Reference | None = None
    named_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all parts, or of the named files."""
        return sum(place.extent.nbytes for place in self.placed) + self.named_bytes

    @classmethod
    def of_leaves(
        cls,
        placed: tuple[Placed, ...],
        skeleton: Skeleton,
        shares: Sequence[Share],
        audits: Sequence[Audit],
    ) -> Self:
        """Of a step: one share and one audit for each file."""
        plans = tuple([share.plan for share in shares if share.plan])
        return cls(placed, skeleton, plans, Evidence(tuple(audits)) if plans else None)

    def entries(self) -> tuple[tuple[LeafEntry, ...], tuple[SliceEntry, ...]]:
        """The leaves that lie whole in its files, and the parts of others, as the rank manifest has them."""
        leaves, slices = [], []
        for place in self.placed:
            part, extent = place.part, place.extent
            if part.whole is None or part.slice is None:
                leaves.append(LeafEntry(part.stored, place.file, extent.offset, extent.nbytes))
            else:
                slices.append(SliceEntry(part.whole, part.slice, place.file, extent.offset))
        return tuple(leaves), tuple(slices)
