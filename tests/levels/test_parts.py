"""Blocks on their way: memory is used again as soon as nobody holds it, and not before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt_core.levels.parts import PART_BYTES, Lent, Loans, Parts, part_bytes


def test_memory_that_is_held_is_lent_to_nobody_else() -> None:
    loans = Loans(16)
    first = loans.take(16)
    part = loans.take(8)[2:4]  # a view of a view
    assert first.obj is not part.obj
    third = loans.take(16)
    assert id(third.obj) not in {id(first.obj), id(part.obj)}
    memory = id(part.obj)
    del part
    again = loans.take(5)
    assert id(again.obj) == memory and again.nbytes == 5


def test_blocks_that_go_one_after_the_other_use_little_memory() -> None:
    loans, seen = Loans(16), set()
    block = None
    for _ in range(100):
        block = loans.take(16)
        seen.add(id(block.obj))
    assert len(seen) == 2


def test_what_may_be_overwritten_is_copied_and_what_is_lent_is_not() -> None:
    buffer, loans = memoryview(bytearray(4)), Loans(4)

    def blocks() -> Iterator[memoryview]:
        for number in range(3):
            buffer[:] = bytes([number]) * 4
            yield buffer
        lent = loans.take(4)
        lent[:] = b"lent"
        yield lent

    out = list(Parts(blocks(), 16))
    assert b"".join(out) == bytes([0] * 4 + [1] * 4 + [2] * 4) + b"lent"
    assert isinstance(out[-1], memoryview) and isinstance(out[-1].obj, Lent)


def test_a_file_that_is_shorter_or_longer_than_was_said_is_an_error() -> None:
    for nbytes in (3, 5):
        parts = Parts([memoryview(b"four")], nbytes)
        with pytest.raises(AssertionError, match=f"4 bytes were given of a file of {nbytes}"):
            parts.joined()
        assert isinstance(parts.raised, AssertionError)


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 40, 4 << 40])
def test_no_file_has_more_parts_than_a_store_takes(nbytes: int) -> None:
    size = part_bytes(nbytes)
    assert size % PART_BYTES == 0 and nbytes <= size * 10_000
