"""Codes: whatever is lost of up to m blocks comes back, and both ways to count give the same bytes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.levels.parity import isal
from ckpt_core.levels.parity.codes import Bytes, Code, combine, combine_by_numpy, power, product

values = st.integers(0, 255)


def blocks_of(count: int, nbytes: int, seed: int = 0) -> list[Bytes]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8))


def encoded(code: Code, data: list[Bytes]) -> list[Bytes]:
    """All blocks of a code."""
    every = list(data)
    for number in range(code.k, code.k + code.m):
        into = np.empty_like(data[0])
        combine_by_numpy(code.coefficients(range(code.k), number), data, into)
        every.append(into)
    return every


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("k", [2, 3, 4, 5, 16])
def test_every_pattern_of_losses_is_made_good(k: int, m: int) -> None:
    code = Code(k, m)
    every = encoded(code, blocks_of(k, 64))
    for lost in combinations(range(k + m), m):
        left = [number for number in range(k + m) if number not in lost]
        for have in combinations(left, k):
            for wanted in lost:
                into = np.empty(64, np.uint8)
                combine(code.coefficients(have, wanted), [every[n] for n in have], into)
                assert np.array_equal(into, every[wanted]), (k, m, have, wanted)


def test_the_first_parity_is_the_xor_of_all() -> None:
    data = blocks_of(4, 100)
    assert np.array_equal(encoded(Code(4, 1), data)[4], np.bitwise_xor.reduce(data))
    assert np.array_equal(encoded(Code(4, 2), data)[4], np.bitwise_xor.reduce(data))


@given(
    st.integers(2, 16).flatmap(lambda k: st.lists(values, min_size=k, max_size=k)),
    st.integers(0, 5000),
    st.integers(0, 1000),
)
def test_isa_l_gives_the_same_bytes_as_numpy(
    coefficients: list[int], nbytes: int, seed: int
) -> None:
    if not isal.is_there():
        pytest.skip("pyeclib is not installed: pip install 'ckpt-core[parity]'")
    blocks = blocks_of(len(coefficients), nbytes, seed)
    ours, theirs = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    combine_by_numpy(coefficients, blocks, ours)
    isal.combine(coefficients, blocks, theirs)
    assert np.array_equal(ours, theirs)


@given(values, values, values)
def test_it_is_a_field(a: int, b: int, c: int) -> None:
    assert product(a, b) == product(b, a)
    assert product(a, product(b, c)) == product(product(a, b), c)
    assert product(a, b ^ c) == product(a, b) ^ product(a, c)
    assert product(a, 1) == a and product(a, 0) == 0
    assert (power(1), power(8)) == (2, 0x1D)
