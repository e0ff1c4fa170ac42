"""How to go through the bytes of a leaf in order, when several ranks have stored it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from ckpt_core.layout import itemsize
from ckpt_core.restore.leaves import LeafPlace, StoredLeaf
from ckpt_core.types import Block, Slice

Span = tuple[int, int, LeafPlace]
"""From the first to before the last byte of the leaf, and where these lie."""


def spans_of(leaf: StoredLeaf) -> list[Span] | None:
    """The parts of a leaf as runs of its bytes, ascending; None when one of them is no such run."""
    spans: list[Span] = []
    for place in leaf.places:
        assert place.part is not None, "a leaf of one rank is no sum of parts"
        begin = _begin(place.part, leaf)
        if begin is None:
            return None
        spans.append((begin, begin + place.part.nbytes, place))
    return sorted(spans, key=lambda span: span[:2])


def _begin(part: Slice, leaf: StoredLeaf) -> int | None:
    """Where in the leaf a part begins, if it is a run of it: rows of the whole, as FSDP2 deals out."""
    block, shape = part.block, leaf.spec.shape
    if block is None or not shape:
        return part.begin
    if tuple(block.sizes[1:]) != tuple(shape[1:]):
        return None
    row_bytes = math.prod(shape[1:]) * itemsize(leaf.spec.dtype)
    return block.offsets[0] * row_bytes + part.begin


def windows(shape: Sequence[int], unit: int, most: int) -> Iterator[tuple[Block, int]]:
    """Boxes that follow one another in the row-major bytes of a leaf, and the bytes of each.

    In each box the first dimensions have one step, one has some, and the others have all: so what it
    shares with any other box is a run of that one's bytes.

    Args:
        shape: of the leaf, which has bytes.
        unit: bytes of one element.
        most: bytes of a box, at least `unit`.
    """
    axis, inner = len(shape), unit
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield Block((0,) * len(shape), tuple(shape)), inner
        return
    axis -= 1
    rest, rows = tuple(shape[axis + 1 :]), most // inner
    for head in product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - first)
            offsets, sizes = (*head, first), (*(1,) * axis, count)
            yield Block((*offsets, *(0,) * len(rest)), (*sizes, *rest)), count * inner
