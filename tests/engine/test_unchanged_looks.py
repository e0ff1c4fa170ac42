"""How leaves look is the same, whether it is seen in live memory or piece by piece, in any order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.save.still_looks import Looks, lines_of
from tests.quick import drawn


def look_of(data: bytes, offset: int, length: int) -> bytes:
    lines = [(offset + at, size) for at, size in lines_of(length)]
    return b"".join(data[begin : begin + size] for begin, size in lines)


@given(
    sizes=st.lists(st.integers(256, 900), min_size=1, max_size=6),
    gap=st.integers(0, 40),
    piece=st.integers(30, 900),
    seed=st.integers(0, 1000),
)
@settings(max_examples=drawn(200), deadline=None)
def test_a_leaf_is_told_once_with_its_lines_however_its_file_is_cut(
    sizes: list[int], gap: int, piece: int, seed: int
) -> None:
    dice = random.Random(seed)
    offsets = [gap + sum(sizes[:at]) + gap * at for at in range(len(sizes))]
    data = dice.randbytes(offsets[-1] + sizes[-1] + gap)
    leaves = {at: (f"leaf{at}", size) for at, size in zip(offsets, sizes, strict=True)}
    told: list[tuple[str, bytes]] = []
    looks = Looks(leaves, lambda name, look: told.append((name, look)))
    starts = list(range(0, len(data), piece))
    for start in dice.sample(starts, len(starts)):
        looks.show(start, memoryview(data)[start : start + piece])
    expected = {name: look_of(data, at, size) for at, (name, size) in leaves.items()}
    assert len(told) == len(leaves)
    assert dict(told) == expected


def test_of_a_file_that_is_not_written_to_its_end_no_leaf_is_told_in_part() -> None:
    told: list[str] = []
    looks = Looks({0: ("a", 100), 100: ("b", 5000)}, lambda name, look: told.append(name))
    looks.show(0, memoryview(bytes(4096)))
    assert told == ["a"]
