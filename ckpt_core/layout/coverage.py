"""What the slices of one leaf hold together, and which of a slice's bytes make up a wanted box.

Boxes become runs of bytes here, and nowhere else: a run is contiguous both in the row-major bytes
of the box that was stored and in those of the box that is wanted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ckpt_core.types import Block, Slice

MAX_VISITS = 20_000_000
"""Work that `uncovered` does at most for all leaves of a step, in looks at a span of a box: hostile boxes
could ask for any amount."""

VISITS_PER_SLICE = 100
"""What each slice adds to it: a mesh of many ranks has many, and each is met a few times."""


class Effort:
    """What is left to be done for the leaves of one step; shared by the calls for them."""

    def __init__(self) -> None:
        self._left = MAX_VISITS

    def add(self, slices: int) -> None:
        """More slices are there to be looked at."""
        self._left += VISITS_PER_SLICE * slices

    def spend(self, visits: int) -> None:
        """Raise _TooMuchWork when it was all done."""
        self._left -= visits
        if self._left < 0:
            raise _TooMuchWork


_Span = tuple[int, int]
"""From the first to before the last."""

_Box = tuple[_Span, ...]
"""A span of elements for each dimension."""


def uncovered(
    shape: Sequence[int], itemsize: int, slices: Sequence[Slice], *, effort: Effort | None = None
) -> str | None:
    """What no slice of a leaf holds, in words; None when each byte is in one of them at least.

    Called by restore, verify and tools with the slices of one leaf from all rank manifests, which
    have passed `RankManifest.decode`. If it gives None and the slices have as many bytes as the
    leaf, each byte is in exactly one.

    Args:
        effort: shared by all leaves of a step; None: this one has a step's effort to itself.
    """
    effort = effort or Effort()
    effort.add(len(slices))
    whole = Block((0,) * len(shape), tuple(shape))
    total = math.prod(shape) * itemsize
    parts: dict[Block, list[_Span]] = {}
    for part in slices:
        if part.nbytes:
            span = (part.begin, part.begin + part.nbytes)
            parts.setdefault(part.block or whole, []).append(span)
    spans = {block: _union(found) for block, found in parts.items()}
    if total == 0 or spans.get(whole) == [(0, total)]:
        return None
    if not spans.keys() - {whole}:
        begin, end = _first_gap(spans.get(whole, []), total)
        return f"bytes {begin} to {end} of {total}"
    # Dimensions of one step say nothing, and each costs as much as any other.
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    boxes: list[_Box] = []
    try:
        for block, found in spans.items():
            narrow = Block(
                tuple([block.offsets[dim] for dim in dims]),
                tuple([block.sizes[dim] for dim in dims]),
            )
            for begin, end in found:
                for box in _boxes(narrow, begin // itemsize, end // itemsize):
                    effort.spend(len(dims) + 1)
                    boxes.append(box)
        hole = _Sweep([shape[dim] for dim in dims], effort).hole(boxes)
    except _TooMuchWork:
        return f"nothing that could be told: its {len(slices)} slices cut one another too often"
    if hole is None:
        return None
    spots = dict(zip(dims, hole, strict=True))
    ranges = [spots.get(dim, (0, size)) for dim, size in enumerate(shape)]
    return f"elements [{', '.join(f'{begin}:{end}' for begin, end in ranges)}] of {list(shape)}"


def needed_ranges(
    stored: Slice, shape: Sequence[int], itemsize: int, wanted: Block | None
) -> list[tuple[int, int, int]]:
    """Which bytes of a stored slice a box of the leaf takes, and where they go.

    Called by restore for each slice and destination, and by tools that put leaves together.

    Args:
        stored: a slice that has passed `RankManifest.decode`.
        shape: of the whole leaf.
        itemsize: bytes of one element.
        wanted: the box, inside the shape; None for the whole leaf.

    Returns:
        `(byte in the slice, byte in the row-major bytes of the wanted box, nbytes)`, ascending in
        both; no two of them could be one.
    """
    whole = Block((0,) * len(shape), tuple(shape))
    common = _Common.of(stored.block or whole, wanted or whole, itemsize)
    if common is None or stored.nbytes == 0:
        return []
    begin, end = stored.begin, stored.begin + stored.nbytes
    return [
        (max(source, begin) - begin, target + max(begin - source, 0), last - max(source, begin))
        for source, target in common.runs(begin, end)
        for last in (min(source + common.run_bytes, end),)
    ]


# -- runs --------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """One dimension of what two boxes share: steps, and bytes of one step in either box."""

    steps: int
    source_bytes: int
    target_bytes: int


@dataclass(frozen=True, slots=True)
class _Common:
    """What a stored and a wanted box share: runs of equal length, one for each point of `axes`.

    Attributes:
        source: where the first run starts in the stored box.
        target: where it starts in the wanted one.
        run_bytes: length of every run.
        axes: innermost first.
    """

    source: int
    target: int
    run_bytes: int
    axes: tuple[_Axis, ...]

    @classmethod
    def of(cls, stored: Block, wanted: Block, itemsize: int) -> _Common | None:
        """None when the boxes share nothing."""
        source = target = 0
        source_bytes = target_bytes = itemsize
        axes: list[_Axis] = []
        run: int | None = None
        dims = zip(stored.offsets, stored.sizes, wanted.offsets, wanted.sizes, strict=True)
        for low, size, want_low, want_size in reversed(tuple(dims)):
            first, last = max(low, want_low), min(low + size, want_low + want_size)
            if first >= last:
                return None
            source += (first - low) * source_bytes
            target += (first - want_low) * target_bytes
            if run is not None:
                axes.append(_Axis(last - first, source_bytes, target_bytes))
            elif not last - first == size == want_size:
                # The first dimension from within that is not whole in both boxes ends the run.
                run = (last - first) * source_bytes
            source_bytes *= size
            target_bytes *= want_size
        run_bytes = source_bytes if run is None else run
        return cls(source, target, run_bytes, _joined(axes))

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Where the runs start, in either box, that have bytes in `begin` to `end` of the stored."""
        points = range(math.prod([axis.steps for axis in self.axes]))
        # Runs ascend in the stored box, so a slice of it finds its own without a look at others.
        low = bisect_right(points, begin - self.run_bytes, key=lambda point: self._at(point)[0])
        high = bisect_left(points, end, key=lambda point: self._at(point)[0])
        inner = self.axes[0] if self.axes else _Axis(1, 0, 0)
        while low < high:
            stop = min(low - low % inner.steps + inner.steps, high)
            source, target = self._at(low)
            for step in range(stop - low):
                yield source + step * inner.source_bytes, target + step * inner.target_bytes
            low = stop

    def _at(self, point: int) -> tuple[int, int]:
        source, target = self.source, self.target
        for axis in self.axes:
            point, step = divmod(point, axis.steps)
            source += step * axis.source_bytes
            target += step * axis.target_bytes
        return source, target


def _joined(axes: Sequence[_Axis]) -> tuple[_Axis, ...]:
    """The same points with fewer axes: those of one step go, those that follow evenly join."""
    found: list[_Axis] = []
    for axis in axes:
        if axis.steps == 1:
            continue
        last = found[-1] if found else None
        if last is not None and axis[1:] == (
            last.steps * last.source_bytes,
            last.steps * last.target_bytes,
        ):
            found[-1] = last._replace(steps=last.steps * axis.steps)
        else:
            found.append(axis)
    return tuple(found)


# -- spans and boxes ---------------------------------------------------------------------------


def _union(spans: Iterable[_Span]) -> list[_Span]:
    """The same bytes in as few spans as can be, ascending."""
    found: list[_Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _first_gap(spans: Sequence[_Span], total: int) -> _Span:
    if not spans or spans[0][0] > 0:
        return 0, spans[0][0] if spans else total
    return spans[0][1], spans[1][0] if len(spans) > 1 else total


def _boxes(block: Block, begin: int, end: int) -> Iterator[_Box]:
    """Elements `begin` to `end` of a block as boxes of the leaf: at most two for each dimension."""
    if (begin, end) == (0, math.prod(block.sizes)):
        pairs = zip(block.offsets, block.sizes, strict=True)
        yield tuple([(low, low + size) for low, size in pairs])
    else:
        yield from _split(block, (), begin, end)


def _split(block: Block, head: _Box, begin: int, end: int) -> Iterator[_Box]:
    """Those elements where the first dimensions are at `head`, counted from there."""
    depth = len(head)
    offset, inner = block.offsets[depth], math.prod(block.sizes[depth + 1 :])
    first, last = begin // inner, end // inner
    if first == last:  # all within one row
        row = ((offset + first, offset + first + 1),)
        yield from _split(block, head + row, begin - first * inner, end - first * inner)
        return
    if begin % inner:
        row = ((offset + first, offset + first + 1),)
        yield from _split(block, head + row, begin % inner, inner)
        first += 1
    if first < last:
        rest = zip(block.offsets[depth + 1 :], block.sizes[depth + 1 :], strict=True)
        rows = ((offset + first, offset + last),)
        yield (*head, *rows, *[(low, low + size) for low, size in rest])
    if end % inner:
        row = ((offset + last, offset + last + 1),)
        yield from _split(block, head + row, 0, end % inner)


class _Sweep:
    """Looks for a point that no box holds: along one dimension, and at each stretch of it where
    the same boxes are met, along the next one among these."""

    def __init__(self, shape: Sequence[int], effort: Effort) -> None:
        self._shape = tuple(shape)
        self._effort = effort

    def hole(self, boxes: Sequence[_Box]) -> _Box | None:
        """A box that holds nothing of any of these; None when there is none."""
        return self._hole(boxes, 0)

    def _hole(self, boxes: Sequence[_Box], depth: int) -> _Box | None:
        if not boxes:
            return tuple([(0, size) for size in self._shape[depth:]])
        if depth == len(self._shape):
            return None
        self._effort.spend(len(boxes))
        starts, ends = _edges(boxes, depth)
        active: dict[int, _Box] = {}
        cuts = sorted({0, self._shape[depth], *starts, *ends})
        for begin, end in pairwise(cuts):
            for index in ends.get(begin, ()):
                del active[index]
            for index in starts.get(begin, ()):
                active[index] = boxes[index]
            hole = self._hole(tuple(active.values()), depth + 1)
            if hole is not None:
                return ((begin, end), *hole)
        return None


def _edges(
    boxes: Sequence[_Box], depth: int
) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
    """Which boxes start, and which end, at each place of a dimension."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for index, box in enumerate(boxes):
        begin, end = box[depth]
        starts.setdefault(begin, []).append(index)
        ends.setdefault(end, []).append(index)
    return starts, ends


class _TooMuchWork(Exception):
    """The effort is used up; never leaves this file."""
