"""How far two arrays of bytes are apart, as numbers of their dtype. The only user of torch in `diff`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_SMALL_INTS = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
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
        mask = _words(a, itemsize) != _words(b, itemsize)
        mask = mask.view(-1, mask.numel() * itemsize // len(a) or 1).any(dim=1) if a else mask
        self.differing += int(mask.sum())
        measured = _measure(a, b, mask, self.dtype)
        if measured is None or not mask.any():
            return
        gap, scale = measured
        finite = torch.isfinite(gap) & torch.isfinite(scale)
        self.not_finite += int((~finite).sum())
        gap, scale = gap[finite], scale[finite]
        if gap.numel():
            self.max_abs = max(self.max_abs or 0.0, float(gap.max()))
            ratio = torch.where(gap > 0, gap / scale, torch.zeros_like(gap))
            self.max_rel = max(self.max_rel or 0.0, float(ratio.max()))


def _words(data: bytearray, itemsize: int) -> Tensor:
    return torch.frombuffer(data, dtype=_WORDS.get(itemsize, torch.int64))


def _measure(a: bytearray, b: bytearray, mask: Tensor, dtype: str) -> tuple[Tensor, Tensor] | None:
    """|a - b| and max(|a|, |b|) of the elements in `mask`; None when they are no numbers."""
    if dtype in ("int64", "uint64"):
        return _long(a, b, mask, unsigned=dtype == "uint64")
    x, y = _numbers(a, dtype), _numbers(b, dtype)
    if x is None or y is None:
        return None
    x, y = x[mask], y[mask]
    return (x - y).abs(), torch.maximum(x.abs(), y.abs())


def _numbers(data: bytearray, dtype: str) -> Tensor | None:
    if dtype in _PARTS:
        parts = torch.frombuffer(data, dtype=getattr(torch, _PARTS[dtype]))
        return torch.view_as_complex(parts.to(torch.float64).view(-1, 2))
    if dtype in _SMALL_INTS:
        kind = torch.uint8 if dtype == "bool" else getattr(torch, dtype)
        return torch.frombuffer(data, dtype=kind).to(torch.float64)
    kind = getattr(torch, dtype, None)
    if (
        not isinstance(kind, torch.dtype)
        or not kind.is_floating_point
        or dtype.startswith("float4")
    ):
        return None
    small = torch.frombuffer(data, dtype=torch.uint8).view(kind)
    return (small.to(torch.float32) if kind.itemsize == 1 else small).to(torch.float64)


def _long(a: bytearray, b: bytearray, mask: Tensor, *, unsigned: bool) -> tuple[Tensor, Tensor]:
    # 64-bit integers have more digits than a float: subtract first, modulo 2**64.
    x, y = _words(a, 8)[mask], _words(b, 8)[mask]
    larger = (x ^ _SIGN_BIT) > (y ^ _SIGN_BIT) if unsigned else x > y
    gap = _unsigned(torch.where(larger, x - y, y - x))
    sizes = [_unsigned(word) if unsigned else word.to(torch.float64).abs() for word in (x, y)]
    return gap, torch.maximum(*sizes)


def _unsigned(words: Tensor) -> Tensor:
    numbers = words.to(torch.float64)
    return torch.where(words < 0, numbers + 2.0**64, numbers)
