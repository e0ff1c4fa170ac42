from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt_core.layout
from ckpt_core.layout import share_leaves, structure_hash
from ckpt_core.layout.share import CUT_BYTES, MIN_SLICE_BYTES, WHOLE_BYTES

Sizes = list[tuple[int, int]]

LEAF = st.tuples(
    st.one_of(
        st.integers(0, 300),
        st.integers(0, 3 * WHOLE_BYTES // 16),
        st.integers(0, 20 * MIN_SLICE_BYTES // 16),
    ),
    st.sampled_from([1, 2, 4, 8, 16]),
).map(lambda pair: (pair[0] * pair[1], pair[1]))


def gpt(layers: int = 12, width: int = 768, words: int = 50257) -> Sizes:
    """Parameters in float32 with two moments and a step counter for each, as AdamW keeps them."""
    square = width * width
    block = [width, width, 3 * square, 3 * width, square, width]
    block += [width, width, 4 * square, 4 * width, 4 * square, width]
    parameters = [words * width, 1024 * width, *block * layers, width, width]
    return [(4 * count, 4) for count in parameters for _ in range(3)] + [(4, 4)] * len(parameters)


def check_tiling(sizes: Sizes, members: int, *, first_only: Collection[int] = ()) -> list[int]:
    """Every byte of every leaf is stored once; the total of each member."""
    ends = [0] * len(sizes)
    owners = [0] * len(sizes)
    totals = []
    for member in range(members):
        shares = share_leaves(sizes, members=members, member=member, first_only=first_only)
        assert len(shares) == len(sizes)
        total = 0
        for index, share in enumerate(shares):
            if share is None:
                continue
            (begin, size), (whole, itemsize) = share, sizes[index]
            assert begin == ends[index]  # members follow one another
            assert size > 0 or whole == 0
            assert begin % itemsize == size % itemsize == begin % CUT_BYTES == 0
            assert size % CUT_BYTES == 0 or begin + size == whole
            ends[index] += size
            owners[index] += 1
            total += size
        totals.append(total)
    assert ends == [size for size, _ in sizes]
    assert all(owners)
    assert all(count == 1 for count, (size, _) in zip(owners, sizes, strict=True) if size == 0)
    return totals


@given(st.lists(LEAF, max_size=40), st.integers(1, 20), st.data())
def test_each_byte_of_each_leaf_is_stored_by_one_member(
    sizes: Sizes, members: int, data: st.DataObject
) -> None:
    indices = st.integers(0, max(len(sizes) - 1, 0))
    first = data.draw(st.sets(indices, max_size=len(sizes)))
    totals = check_tiling(sizes, members, first_only=first)
    alone = sum(sizes[index][0] for index in first)
    total = sum(size for size, _ in sizes) - alone
    room = total / members + total / 100 + CUT_BYTES * (len(sizes) + 1)
    assert totals[0] - alone <= room
    assert max(totals[1:], default=0) <= room


@given(st.lists(LEAF, max_size=20))
def test_one_member_alone_stores_everything_whole(sizes: Sizes) -> None:
    assert share_leaves(sizes, members=1, member=0) == [(0, size) for size, _ in sizes]


@given(st.lists(LEAF, min_size=1, max_size=20), st.integers(2, 9))
def test_leaves_of_the_first_member_alone_are_stored_by_no_other(
    sizes: Sizes, members: int
) -> None:
    everything = range(len(sizes))
    first, *others = (
        share_leaves(sizes, members=members, member=member, first_only=everything)
        for member in range(members)
    )
    assert first == [(0, size) for size, _ in sizes]
    assert others == [[None] * len(sizes)] * (members - 1)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 8, 64, 1024])
def test_members_of_a_large_job_store_even_shares_of_a_gpt(members: int) -> None:
    sizes = gpt()
    totals = check_tiling(sizes, members)
    total = sum(size for size, _ in sizes)
    assert total > 10**9
    assert max(totals) <= total / members + total / 100
    assert max(totals) - min(totals) <= 2 * WHOLE_BYTES + 2 * CUT_BYTES


@pytest.mark.parametrize("members", [2, 3, 8])
def test_a_large_leaf_is_cut_into_one_slice_for_each_member(members: int) -> None:
    sizes = [(members * MIN_SLICE_BYTES + 4 * extra, 4) for extra in range(50)]
    for member in range(members):
        shares = share_leaves(sizes, members=members, member=member)
        for share, (size, _) in zip(shares, sizes, strict=True):
            assert share is not None
            assert abs(share[1] - size / members) < 2 * CUT_BYTES


@pytest.mark.parametrize("members", [2, 3, 8, 100])
def test_small_leaves_of_a_large_state_stay_whole(members: int) -> None:
    sizes = [(4 * (1 + index % (WHOLE_BYTES // 4)), 4) for index in range(5000)]
    for member in range(members):
        shares = share_leaves(sizes, members=members, member=member)
        for share, (size, _) in zip(shares, sizes, strict=True):
            assert share in (None, (0, size))


def many() -> Sizes:
    """Ten thousand leaves from 4 bytes to 64 MiB."""
    return [(4 << index % 25, 4) for index in range(10_000)]


@pytest.mark.parametrize("member", [0, 1, 340, 511, 1022])
def test_neighbours_among_a_thousand_members_fit_together(member: int) -> None:
    sizes = many()
    here, there = (
        share_leaves(sizes, members=1024, member=which) for which in (member, member + 1)
    )
    total = sum(size for size, _ in sizes)
    for shares in (here, there):
        stored = sum(share[1] for share in shares if share is not None)
        assert stored <= total * (1 / 1024 + 0.01)
    both = 0
    for left, right in zip(here, there, strict=True):
        if left is not None and right is not None:
            assert left[0] + left[1] == right[0]
            both += 1
    assert both >= 400


def test_a_thousand_leaves_are_whole_over_a_thousand_members() -> None:
    check_tiling(many()[:1000], 1024)


def peak_bytes(sizes: Sizes, members: int) -> int:
    tracemalloc.start()
    try:
        share_leaves(sizes, members=members, member=members // 2)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("members", [1, 8, 1024, 10_000])
def test_a_plan_takes_memory_for_its_leaves_alone(members: int) -> None:
    assert peak_bytes(many(), members) < 500 * 10_000


PROGRAM = """
import importlib.machinery, json, sys, types
package = types.ModuleType("ckpt_core")
package.__path__ = [sys.argv[1]]
sys.modules["ckpt_core"] = package
from ckpt_core.layout import share_leaves, structure_hash
sizes = [(4 * (index * 7919 % 100_003), 4) for index in range(500)]
first = {3, 1, 499, 77}
print([share_leaves(sizes, members=5, member=m, first_only=first) for m in range(5)])
rows = [(f"layer.{size}", "float32", (size // 4,), "") for size, _ in sizes]
print(structure_hash(rows, members=5))
"""


def test_every_process_comes_to_the_same_plan() -> None:
    root = ckpt_core.layout.__path__[0].removesuffix("/layout")
    said = set()
    for seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, root],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        said.add(done.stdout)
    assert len(said) == 1


ROWS = [("a", "float32", (2, 3), ""), ("b", "float32", (2,), "private"), ("c", "int8", (), "")]


def test_any_difference_of_structure_changes_its_hash() -> None:
    variants: list[tuple[Sequence[tuple[str, str, tuple[int, ...], str]], int]] = [
        (ROWS, 2),
        (ROWS, 3),
        (ROWS[:2], 2),
        (ROWS[::-1], 2),
        ([("A", *ROWS[0][1:]), *ROWS[1:]], 2),
        ([("a", "int32", (2, 3), ""), *ROWS[1:]], 2),
        ([("a", "float32", (3, 2), ""), *ROWS[1:]], 2),
        ([("a", "float32", (23,), ""), *ROWS[1:]], 2),
        ([("a", "float32", (2, 3), "private"), *ROWS[1:]], 2),
        ([('a","float32', "", (2, 3), ""), *ROWS[1:]], 2),
    ]
    hashes = [structure_hash(rows, members=members) for rows, members in variants]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in hashes)
    for left, right in itertools.combinations(hashes, 2):
        assert left != right


def test_the_hash_takes_any_iterable_and_any_name() -> None:
    rows = [("\ud800\x00é", "float32", (1,), "")]
    assert structure_hash(iter(rows), members=1) == structure_hash(rows, members=1)
