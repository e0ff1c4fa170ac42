"""Blocks of any size travel in parts of one size, in memory that is used again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pickle import PickleBuffer

import pytest

from ckpt_core.levels.far.parts import PART_BYTES, Parts


def cut(data: bytes, size: int) -> Iterator[memoryview]:
    """Blocks in one buffer, each over the one before."""
    buffer = bytearray(size)
    for begin in range(0, len(data), size):
        block = data[begin : begin + size]
        buffer[: len(block)] = block
        yield memoryview(buffer)[: len(block)]


@pytest.mark.parametrize("size", [4096, 3 << 19, 1 << 20, PART_BYTES, PART_BYTES + 4096])
@pytest.mark.parametrize("nbytes", [1, PART_BYTES, 2 * PART_BYTES, 2 * PART_BYTES + 12345])
def test_blocks_of_any_size_travel_in_parts_of_one_size(size: int, nbytes: int) -> None:
    data = os.urandom(nbytes)
    parts = [bytes(part) for part in Parts(cut(data, size), nbytes)]
    assert b"".join(parts) == data
    assert {len(part) for part in parts[:-1]} <= {PART_BYTES}
    assert len(parts) == -(-nbytes // PART_BYTES)


def test_memory_that_the_client_still_has_is_not_used_again() -> None:
    data = os.urandom(3 * PART_BYTES)
    # As the client does with each, until it has sent it.
    held = [PickleBuffer(part) for part in Parts(cut(data, 1 << 20), len(data))]
    assert b"".join(map(bytes, held)) == data


def test_memory_that_the_client_has_let_go_of_is_used_again() -> None:
    data = bytes(3 * PART_BYTES)
    parts = Parts(cut(data, 1 << 20), len(data))
    assert sum(1 for _ in parts) == 3
    assert len(parts._lent) == 1


def test_a_file_that_ends_early_or_late_is_never_completed() -> None:
    for nbytes in (4096, PART_BYTES + 4096):
        with pytest.raises(AssertionError, match="bytes were given of a file of"):
            list(Parts(cut(bytes(nbytes - 1), 4096), nbytes))
        with pytest.raises(AssertionError, match="bytes were given of a file of"):
            list(Parts(cut(bytes(nbytes + 1), 4096), nbytes))
