"""Which part of each leaf each rank stores, when all of them hold the same values.

A function of sizes alone, so every rank computes it without asking the others. A large leaf is cut
into one slice for each rank, so that all ranks have the same work at the same time, leaf by leaf.
The others are laid end to end, and that stream is cut into ranges: small leaves stay whole.

Source: DeepFreeze IV-C (sharding among data-parallel ranks).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence

import xxhash

CUT_BYTES = 128
"""Leaves are cut at multiples of this: a pair of cache lines, and whole elements of every dtype."""

MIN_SLICE_BYTES = 64 * 1024
"""A leaf is cut into a slice for each rank only if all of them are at least so long: each slice is
an entry in a manifest and a read of its own at restore."""

WHOLE_BYTES = 4096
"""A leaf of up to so many bytes is never cut, unless that would be a noticeable part of the state."""

_PLAN = "1"
"""Changes with the rules in this file: ranks that cut differently must notice."""


def share_leaves(
    sizes: Sequence[tuple[int, int]],
    *,
    members: int,
    member: int,
    first_only: Collection[int] = (),
) -> list[tuple[int, int] | None]:
    """What one of several ranks stores: `(begin, nbytes)` in each leaf's bytes, or None.

    Called on every rank when the structure is new. Over all members each byte of each leaf occurs
    once; an empty leaf is one member's, as (0, 0). No member has more than its even share and 1 %
    of the total, apart from 128 bytes for a leaf.

    Args:
        sizes: `(nbytes, itemsize)` of every leaf, the same on every rank.
        members: how many ranks store them together.
        member: which of those this one is, from 0.
        first_only: indices of leaves that member 0 stores whole; not part of what is balanced.
    """
    assert 0 <= member < members, f"member {member} of {members}"
    first = frozenset(first_only)
    shares: list[tuple[int, int] | None] = [None] * len(sizes)
    if member == 0:
        for index in first:
            shares[index] = (0, sizes[index][0])
    rest = [(index, size) for index, (size, _) in enumerate(sizes) if index not in first]
    large = members * MIN_SLICE_BYTES
    parts = (
        _deal_empty([index for index, size in rest if size == 0], members, member),
        _cut_large([pair for pair in rest if pair[1] >= large], members, member),
        _cut_stream([pair for pair in rest if 0 < pair[1] < large], members, member),
    )
    for part in parts:
        for index, begin, end in part:
            shares[index] = (begin, end - begin)
    return shares


def structure_hash(rows: Iterable[tuple[str, str, tuple[int, ...], str]], *, members: int) -> str:
    """16 hex digits that are equal on two ranks only if both cut the same leaves the same way.

    Called on every rank when the structure is new; the ranks compare what they get.

    Args:
        rows: `(name, dtype, shape of the whole leaf, kind)` of every leaf in order. `kind` is any
            text that tells leaves apart which are stored differently: private ones, those of the
            first rank alone, and each placement of distributed ones.
        members: as for `share_leaves`.
    """
    digest = xxhash.xxh3_64()
    # JSON, because it is unambiguous whatever names contain, and the same in every process.
    digest.update(json.dumps([_PLAN, members]).encode())
    for row in rows:
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def _deal_empty(
    indices: Sequence[int], members: int, member: int
) -> Iterator[tuple[int, int, int]]:
    for index in indices[member::members]:
        yield index, 0, 0


def _cut_large(
    leaves: Sequence[tuple[int, int]], members: int, member: int
) -> Iterator[tuple[int, int, int]]:
    """`(index, begin, end)` of this member's slice of each leaf; all of them about equal."""
    turn = 0
    for index, size in leaves:
        even, extra = divmod(-(-size // CUT_BYTES), members)
        # `extra` members, from `turn` on and around, take one unit more: each leaf goes on where
        # the one before it stopped, so that no member has more than one unit more in all.
        around = max(turn + extra - members, 0)
        begin, end = (
            (even * which + min(which, around) + min(max(which - turn, 0), extra - around))
            * CUT_BYTES
            for which in (member, member + 1)
        )
        turn = (turn + extra) % members
        yield index, begin, min(end, size)


def _cut_stream(
    leaves: Sequence[tuple[int, int]], members: int, member: int
) -> Iterator[tuple[int, int, int]]:
    """`(index, begin, end)` of the leaves that this member's range of the stream touches."""
    total = sum([size for _, size in leaves])
    whole = min(WHOLE_BYTES, max(CUT_BYTES, total // 100))
    low, high = total * member // members, total * (member + 1) // members
    start = 0
    for index, size in leaves:
        begin, end = _cut(low - start, size, whole), _cut(high - start, size, whole)
        start += size
        if begin < end:
            yield index, begin, end


def _cut(place: int, size: int, whole: int) -> int:
    """Where a leaf is cut that the stream should be cut at `place` of, counted from its start.

    Never decreases while `place` grows, so what ends one member's range begins the next one's.
    """
    if place <= 0 or place >= size:
        return 0 if place <= 0 else size
    if size <= whole:
        return size if 2 * place >= size else 0
    return min((place + CUT_BYTES // 2) // CUT_BYTES * CUT_BYTES, size)
