"""What the ranks have in common, in a form that can name the leaf that differs.

Ranks tell each other hashes. Only when those differ do they exchange this: names, dtypes, shapes, and digests
of what was read of each leaf.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class LeafRow(NamedTuple):
    """One leaf: what must be equal on all ranks.

    Attributes:
        name, dtype, shape, kind: as the plan has them.
        group: of the ranks whose contents are equal.
        digest: of what was read of the contents; "" where nothing was.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    group: str = ""
    digest: str = ""


def encode_rows(rows: Iterable[LeafRow]) -> bytes:
    """Compressed JSON."""
    return zlib.compress(json.dumps(list(rows)).encode(), 1)


def difference(one: bytes, other: bytes, rank: int) -> str | None:
    """What a rank's rows have otherwise than those of `rank`, as a sentence; None if nothing."""
    mine, theirs = _decoded(one), _decoded(other)
    for here, there in zip(mine, theirs, strict=False):
        text = _structural(here, there, rank)
        if text is not None:
            return text
    if len(mine) != len(theirs):
        longer, side = (mine, "it has") if len(mine) > len(theirs) else (theirs, f"rank {rank} has")
        extra = longer[min(len(mine), len(theirs))]
        return f"{side} a leaf {extra.name!r} that the other one lacks"
    odd = [here for here, there in zip(mine, theirs, strict=True) if _contents_differ(here, there)]
    return _not_equal(odd, rank) if odd else None


def _decoded(rows: bytes) -> list[LeafRow]:
    found: list[list[Any]] = json.loads(zlib.decompress(rows))
    return [LeafRow(row[0], row[1], tuple(row[2]), *row[3:]) for row in found]


def _structural(here: LeafRow, there: LeafRow, rank: int) -> str | None:
    if here.name != there.name:
        return f"where rank {rank} has the leaf {there.name!r}, it has {here.name!r}"
    for what, mine, theirs in (
        ("dtype", here.dtype, there.dtype),
        ("shape", here.shape, there.shape),
        ("placement", here.kind or "none", there.kind or "none"),
    ):
        if mine != theirs:
            return f"{what} of its leaf {here.name!r} is {mine}, and {theirs} on rank {rank}"
    return None


def _contents_differ(here: LeafRow, there: LeafRow) -> bool:
    compared = here.digest and there.digest and here.group == there.group
    return bool(compared) and here.digest != there.digest


def _not_equal(odd: list[LeafRow], rank: int) -> str:
    more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
    return (
        f"its leaf {odd[0].name!r}{more} is not equal to that of rank {rank}, so it is no replica: name it "
        f"in per_rank=, or, for buffers such as BatchNorm's, pass the module itself instead of its "
        f"state_dict(); or, if it was meant to be equal, find what made the ranks drift apart"
    )


@dataclass(frozen=True, slots=True)
class TextReference:
    """The `Reference` of a save whose plan says all: what differs is that text."""

    text: str

    def marks(self) -> dict[str, str]:
        """See `Reference.marks`: the plan says all."""
        return {}

    def encode(self) -> bytes:
        """See `Reference.encode`."""
        return self.text.encode()

    def difference(self, one: bytes, other: bytes, rank: int) -> str | None:
        """See `Reference.difference`."""
        return (
            None if one == other else f"it saves {one.decode()}, and rank {rank} {other.decode()}"
        )
