from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.layout import coverage, needed_ranges, share_leaves, uncovered
from ckpt_core.types import Block, Slice

Ints = npt.NDArray[np.int64]
SHAPE = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def blocks(draw: st.DrawFn, shape: Sequence[int]) -> Block | None:
    """None for the whole, or a box inside the shape, empty ones too."""
    if draw(st.booleans()):
        return None
    offsets = [draw(st.integers(0, dim)) for dim in shape]
    sizes = [draw(st.integers(0, dim - offset)) for dim, offset in zip(shape, offsets, strict=True)]
    return Block(tuple(offsets), tuple(sizes))


@st.composite
def slices(draw: st.DrawFn, shape: Sequence[int], itemsize: int) -> Slice:
    block = draw(blocks(shape))
    count = math.prod(shape if block is None else block.sizes)
    begin = draw(st.just(0) | st.integers(0, count))
    end = draw(st.just(count) | st.integers(begin, count))
    return Slice(begin * itemsize, (end - begin) * itemsize, block)


def elements(shape: Sequence[int], block: Block | None) -> Ints:
    """Numbers of a box's elements in the leaf, in the box's row-major order."""
    leaf = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if block is not None:
        pairs = zip(block.offsets, block.sizes, strict=True)
        leaf = leaf[tuple(slice(low, low + size) for low, size in pairs)]
    return leaf.reshape(-1)


def held(shape: Sequence[int], itemsize: int, part: Slice) -> Ints:
    """Numbers of a slice's elements, in its order."""
    found = elements(shape, part.block)
    return found[part.begin // itemsize : (part.begin + part.nbytes) // itemsize]


@given(st.data(), SHAPE, st.sampled_from([1, 4]))
def test_the_runs_of_a_slice_fill_a_box_as_indexing_would(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int
) -> None:
    stored = data.draw(slices(shape, itemsize))
    wanted = data.draw(blocks(shape))
    source, target = held(shape, itemsize, stored), elements(shape, wanted)
    found = np.full(target.shape, -1)
    runs = needed_ranges(stored, shape, itemsize, wanted)
    for at, to, size in runs:
        assert size > 0
        assert at % itemsize == to % itemsize == size % itemsize == 0
        first, last = to // itemsize, (to + size) // itemsize
        assert (found[first:last] == -1).all()
        found[first:last] = source[at // itemsize : (at + size) // itemsize]
    assert (found == np.where(np.isin(target, source), target, -1)).all()
    for (at, to, size), (next_at, next_to, _) in itertools.pairwise(runs):
        assert at + size <= next_at
        assert to + size <= next_to
        assert (at + size, to + size) != (next_at, next_to)


@given(st.data(), SHAPE, st.sampled_from([1, 4]))
def test_what_no_slice_holds_is_noticed(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int
) -> None:
    parts = data.draw(st.lists(slices(shape, itemsize), max_size=6))
    covered = np.zeros(math.prod(shape), dtype=bool)
    for part in parts:
        covered[held(shape, itemsize, part)] = True
    assert (uncovered(shape, itemsize, parts) is None) == covered.all()


@given(st.integers(0, 10**7), st.integers(1, 9))
def test_the_shares_of_all_members_cover_a_leaf(count: int, members: int) -> None:
    shares = [
        share_leaves([(4 * count, 4)], members=members, member=member)[0]
        for member in range(members)
    ]
    parts = [Slice(*share) for share in shares if share is not None]
    assert uncovered((count,), 4, parts) is None
    if len(parts) > 1:
        for missing in range(len(parts)):
            assert uncovered((count,), 4, parts[:missing] + parts[missing + 1 :]) is not None


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "bytes 0 to 64 of 64"),
        ([Slice(0, 0)], "bytes 0 to 64 of 64"),
        ([Slice(8, 56)], "bytes 0 to 8 of 64"),
        ([Slice(0, 8), Slice(16, 48)], "bytes 8 to 16 of 64"),
        ([Slice(32, 16), Slice(0, 40)], "bytes 48 to 64 of 64"),
        ([Slice(0, 32, Block((0, 0), (2, 4)))], "elements [2:4, 0:4] of [4, 4]"),
        (
            [Slice(0, 32, Block((0, 0), (4, 2))), Slice(0, 16, Block((2, 2), (2, 2)))],
            "elements [0:2, 2:4] of [4, 4]",
        ),
        (
            [Slice(0, 32, Block((0, 0), (4, 2))), Slice(0, 28, Block((0, 2), (4, 2)))],
            "elements [3:4, 3:4] of [4, 4]",
        ),
    ],
)
def test_the_text_says_what_is_missing(parts: list[Slice], text: str) -> None:
    assert uncovered((4, 4), 4, parts) == text


def test_a_huge_leaf_with_little_stored_is_noticed_at_once() -> None:
    shape = (2**20, 2**20, 2**18)
    assert uncovered(shape, 4, [Slice(0, 4)]) == f"bytes 4 to {2**60} of {2**60}"
    corner = Block((1, 2, 3), (1, 1, 1))
    assert uncovered(shape, 4, [Slice(0, 4, corner)]) is not None
    assert needed_ranges(Slice(0, 4, corner), shape, 4, None) == [
        (0, 4 * (2**38 + 2 * 2**18 + 3), 4)
    ]


def test_a_mesh_of_many_boxes_in_slices_covers_its_leaf() -> None:
    parts = []
    for row, column in itertools.product(range(64), range(64)):
        block = Block((row * 100, column * 10), (100, 10))
        parts += [Slice(begin, 800, block) for begin in range(0, 4000, 800)]
    assert uncovered((6400, 640), 4, parts) is None
    assert uncovered((6400, 640), 4, parts[:9999] + parts[10_000:]) is not None


def test_a_column_of_many_rows_is_one_run_for_each() -> None:
    runs = needed_ranges(Slice(0, 4 * 10**8), (10_000, 10_000), 4, Block((0, 5), (10_000, 100)))
    assert runs == [(40_000 * row + 20, 400 * row, 400) for row in range(10_000)]


def test_a_slice_looks_at_its_own_runs_alone() -> None:
    shape, columns = (2**30, 64), Block((0, 8), (2**30, 8))
    begin = 2**29 * 256 + 40
    assert needed_ranges(Slice(begin, 256), shape, 4, columns) == [
        (0, 2**29 * 32 + 8, 24),
        (248, 2**29 * 32 + 32, 8),
    ]


def test_boxes_that_cut_one_another_without_end_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coverage, "MAX_VISITS", 1000)
    monkeypatch.setattr(coverage, "VISITS_PER_SLICE", 0)
    parts = [Slice(0, 4 * 50 * rows, Block((0, 0), (rows, 50))) for rows in range(1, 50)]
    parts += [Slice(0, 200, Block((49, 0), (1, 50)))]
    text = uncovered((50, 50), 4, parts)
    assert text is not None
    assert "too often" in text
    monkeypatch.undo()
    assert uncovered((50, 50), 4, parts) is None


def test_all_leaves_of_a_step_share_one_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Slice(0, 4 * 50 * rows, Block((0, 0), (rows, 50))) for rows in range(1, 50)]
    parts += [Slice(0, 200, Block((49, 0), (1, 50)))]
    monkeypatch.setattr(coverage, "MAX_VISITS", 5000)
    monkeypatch.setattr(coverage, "VISITS_PER_SLICE", 0)
    effort = coverage.Effort()
    found = [uncovered((50, 50), 4, parts, effort=effort) for _ in range(20)]
    assert found[0] is None
    assert "too often" in str(found[-1])


def test_dimensions_of_one_step_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (*[1] * 250, 4, 6, *[1] * 3)
    block = Block((0,) * 255, shape)
    parts = [Slice(4 * begin, 4, block) for begin in range(23)]
    monkeypatch.setattr(coverage, "MAX_VISITS", 1000)
    monkeypatch.setattr(coverage, "VISITS_PER_SLICE", 0)
    parts.append(Slice(0, 4, Block((*[0] * 250, 3, 5, 0, 0, 0), (1,) * 255)))
    assert uncovered(shape, 4, parts) is None
    missing = str(uncovered(shape, 4, parts[1:]))
    assert "0:1, 0:1, 0:1, 0:1]" in missing
