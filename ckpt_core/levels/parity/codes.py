"""One block from k others: XOR, and Reed-Solomon over GF(256) as RAID 6 has it. Pure.

    code = Code(4, 2)
    combine(code.coefficients(range(4), 5), blocks, into)       the second parity of four blocks
    combine(code.coefficients([0, 2, 3, 5], 1), blocks, into)   the second block, from three others and that

Blocks are numbered: 0 to k-1 are data, k and above parity. The first parity is the XOR of all; in the second,
block number i counts 2**i times, where numbers are polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1.

Source: H. P. Anvin, The mathematics of RAID-6; ISA-L has the same field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ckpt_core.levels.parity import isal

Bytes = NDArray[np.uint8]
Combine = Callable[[Sequence[int], Sequence[Bytes], Bytes], None]

_POLYNOMIAL = 0x11D


@dataclass(frozen=True, slots=True)
class Code:
    """k blocks of data and m of parity, m being 1 or 2: any m of them may be lost."""

    k: int
    m: int

    def coefficients(self, have: Sequence[int], wanted: int) -> list[int]:
        """How often each of k blocks counts in another one (0: not at all).

        Args:
            have: numbers of the k blocks, all different.
            wanted: the number of the block that is to be had.
        """
        assert len({*have}) == len(have) == self.k
        inverse = _inverted([self._row(number) for number in have])
        row = self._row(wanted)
        return [
            _sum([product(row[i], inverse[i][j]) for i in range(self.k)]) for j in range(self.k)
        ]

    def _row(self, number: int) -> list[int]:
        """A block in terms of the data."""
        if number < self.k:
            return [int(number == i) for i in range(self.k)]
        return [power(i * (number - self.k)) for i in range(self.k)]


def combine(coefficients: Sequence[int], blocks: Sequence[Bytes], into: Bytes) -> None:
    """Write the sum of blocks, each as often as its coefficient says. All are of one length.

    By ISA-L where it is installed (the extra `parity`): one pass over memory, also for a plain XOR.
    """
    if isal.is_there():
        isal.combine(coefficients, blocks, into)
    else:
        combine_by_numpy(coefficients, blocks, into)


def combine_by_numpy(coefficients: Sequence[int], blocks: Sequence[Bytes], into: Bytes) -> None:
    """As `combine`, slower where coefficients are above 1: bit by bit, the highest first, as Horner does."""
    into.fill(0)
    carry = np.empty_like(into)
    for bit in reversed(range(max(coefficients, default=0).bit_length())):
        for coefficient, block in zip(coefficients, blocks, strict=True):
            if coefficient >> bit & 1:
                np.bitwise_xor(into, block, out=into)
        if bit:
            _double(into, carry)


def _double(values: Bytes, carry: Bytes) -> None:
    """Twice each of them, in place. `carry` is overwritten."""
    np.right_shift(values, 7, out=carry)
    np.multiply(carry, _POLYNOMIAL & 0xFF, out=carry)
    np.add(values, values, out=values)  # faster than a shift
    np.bitwise_xor(values, carry, out=values)


# -- the field ---------------------------------------------------------------------------------------


@cache
def _powers() -> list[int]:
    found, value = [], 1
    for _ in range(255):
        found.append(value)
        value <<= 1
        value ^= _POLYNOMIAL if value & 0x100 else 0
    return found


@cache
def _logarithms() -> dict[int, int]:
    return {value: exponent for exponent, value in enumerate(_powers())}


def power(exponent: int) -> int:
    """2 to that power."""
    return _powers()[exponent % 255]


def product(a: int, b: int) -> int:
    """a times b."""
    return power(_logarithms()[a] + _logarithms()[b]) if a and b else 0


def _sum(values: Sequence[int]) -> int:
    total = 0
    for value in values:
        total ^= value
    return total


def _inverted(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """By elimination. Every matrix that k different rows of a code make has an inverse."""
    n = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i in range(n):
        at = next(j for j in range(i, n) if rows[j][i])
        rows[i], rows[at] = rows[at], rows[i]
        factor = power(-_logarithms()[rows[i][i]])
        rows[i] = [product(factor, value) for value in rows[i]]
        for j in range(n):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [a ^ product(factor, b) for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[n:] for row in rows]
