"""How far two arrays of bytes are apart, as numbers of their dtype: all that `diff` needs arrays for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Array = Any
"""Of numpy or of torch: what is asked of them here they have under the same names."""

_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_PARTS = {
    **{"complex32": "float16", "bcomplex32": "bfloat16"},
    **{"complex64": "float32", "complex128": "float64"},
}
_PLAIN = "float16 float32 float64 int8 int16 int32 uint8 uint16 uint32".split()
_SIGN_BIT = -(2**63)


@dataclass(slots=True)
class Distance:
    """Differences of two tensors of one dtype and shape, gathered piece by piece.

    Attributes:
        dtype: name of the dtype.
        differing: elements whose bytes differ.
        max_abs: largest |a - b| among those where both are finite; None when the dtype has no numbers.
        max_rel: largest |a - b| / max(|a|, |b|) among them.
        not_finite: differing elements where either one is infinite or NaN.
    """

    dtype: str
    differing: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    not_finite: int = 0

    def feed(self, a: bytearray, b: bytearray, *, itemsize: int) -> None:
        """The next pieces, of whole elements and equal length."""
        lib = _library(self.dtype)
        mask = _words(lib, a, itemsize) != _words(lib, b, itemsize)
        if itemsize > max(_WORDS):
            mask = mask.reshape(-1, itemsize // max(_WORDS)).any(1)
        differing = int(mask.sum())
        if not differing:
            return
        self.differing += differing
        with _silence(lib):
            self._measure(lib, a, b, mask)

    def _measure(self, lib: ModuleType, a: bytearray, b: bytearray, mask: Array) -> None:
        measured = _measure(lib, a, b, self.dtype)
        if measured is None:
            return
        gap, scale = measured
        finite = lib.isfinite(gap) & lib.isfinite(scale)
        self.not_finite += int((mask & ~finite).sum())
        mask = mask & finite
        if not mask.any():
            return
        # Not gap[mask], which takes longer than all else together.
        gap = lib.where(mask, gap, 0.0)
        ratio = gap / lib.where(gap > 0, scale, 1.0)
        self.max_abs = max(self.max_abs or 0.0, float(gap.max()))
        self.max_rel = max(self.max_rel or 0.0, float(ratio.max()))


def _library(dtype: str) -> ModuleType:
    """numpy, whose import takes a tenth of that of torch, where it is there and has the dtype."""
    if not dtype.startswith("float8"):
        try:
            import numpy

            return numpy
        except ImportError:  # torch does not need it
            pass
    import torch

    return torch


def _silence(lib: ModuleType) -> AbstractContextManager[Any]:
    """No warning of what is not finite: it is counted."""
    return lib.errstate(all="ignore") if hasattr(lib, "errstate") else nullcontext()


def _words(lib: ModuleType, data: bytearray, itemsize: int) -> Array:
    return lib.frombuffer(data, dtype=getattr(lib, _WORDS.get(itemsize, "int64")))


def _measure(lib: ModuleType, a: bytearray, b: bytearray, dtype: str) -> tuple[Array, Array] | None:
    """|a - b| and max(|a|, |b|) of each element; None when they are no numbers."""
    if dtype in ("int64", "uint64"):
        return _long(lib, a, b, unsigned=dtype == "uint64")
    x, y = _numbers(lib, a, dtype), _numbers(lib, b, dtype)
    if x is None or y is None:
        return None
    return abs(x - y), lib.maximum(abs(x), abs(y))


def _numbers(lib: ModuleType, data: bytearray, dtype: str) -> Array | None:
    if dtype in ("bfloat16", "bcomplex32"):  # upper halves of float32, and unknown to numpy
        words = lib.asarray(_words(lib, data, 2), dtype=lib.int32)
        numbers = _double(lib, (words << 16).view(lib.float32))
        return numbers.view(lib.complex128) if dtype in _PARTS else numbers
    if dtype.startswith("float8"):
        kind = getattr(lib, dtype, None)
        numbers = _words(lib, data, 1)
        return None if kind is None else _double(lib, numbers.view(kind).to(lib.float32))
    plain = "uint8" if dtype == "bool" else _PARTS.get(dtype, dtype)
    if plain not in _PLAIN:
        return None
    numbers = _double(lib, lib.frombuffer(data, dtype=getattr(lib, plain)))
    return numbers.view(lib.complex128) if dtype in _PARTS else numbers


def _double(lib: ModuleType, numbers: Array) -> Array:
    return lib.asarray(numbers, dtype=lib.float64)


def _long(lib: ModuleType, a: bytearray, b: bytearray, *, unsigned: bool) -> tuple[Array, Array]:
    # 64-bit integers have more digits than a float: subtract first, modulo 2**64.
    x, y = _words(lib, a, 8), _words(lib, b, 8)
    larger = (x ^ _SIGN_BIT) > (y ^ _SIGN_BIT) if unsigned else x > y
    gap = _unsigned(lib, lib.where(larger, x - y, y - x))
    sizes = [_unsigned(lib, word) if unsigned else abs(_double(lib, word)) for word in (x, y)]
    return gap, lib.maximum(*sizes)


def _unsigned(lib: ModuleType, words: Array) -> Array:
    numbers = _double(lib, words)
    return lib.where(words < 0, numbers + 2.0**64, numbers)
