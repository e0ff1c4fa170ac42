"""Leaves: the tensors of a state, each with the name and the bytes that a checkpoint stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from ckpt_core.types import LeafSpec

_T = TypeVar("_T")
_Span = tuple[Hashable, int, int]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stored tensor.

    Attributes:
        spec: name, dtype and shape as stored; the bytes are those of `tensor` in row-major order.
        tensor: detached alias of live memory, of any strides and device; never requires grad.
        eager: training may change it before the next barrier: `save` copies it before it returns.
    """

    spec: LeafSpec
    tensor: Tensor
    eager: bool

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return self.tensor.nbytes


@cache
def dtypes() -> dict[str, torch.dtype]:
    """Every dtype of this torch by its canonical name, such as "float32"."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype_name(value): value for value in found}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the prefix."""
    return str(dtype).removeprefix("torch.")


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of that shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one that such a view touches; 0 for an empty view."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def meeting(spans: Iterable[_T], of: Callable[[_T], _Span]) -> list[list[_T]]:
    """Groups of those whose bytes meet; they come in order of memory and first byte.

    Args:
        of: the memory, its first byte that one touches, and the one behind the last.
    """
    groups: list[list[_T]] = []
    memory, end = None, 0
    for span in spans:
        where, low, high = of(span)
        if where != memory or low >= end:
            groups.append([])
            memory, end = where, low
        groups[-1].append(span)
        end = max(end, high)
    return groups


def view_key(tensor: Tensor) -> tuple[Hashable, ...]:
    """Equal for strided tensors that show the same memory in the same way: storage and offset come first."""
    start = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    return (*start, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements may lie at one place (never False when they do)."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def typed_view(
    source: Tensor, dtype: torch.dtype, *, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """View of `source`'s storage; `offset` in elements of `dtype`, from the storage's start.

    Goes through a byte tensor because creating some dtypes directly warns (complex32).
    """
    empty = torch.empty(0, dtype=torch.uint8, device=source.device).view(dtype)
    return empty.set_(source.untyped_storage(), offset, tuple(shape), tuple(stride))


def empty_leaf(
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    shift_bytes: int = 0,
) -> Tensor:
    """Fresh tensor of any dtype, in host memory whatever torch's default device is.

    Its first byte lies `shift_bytes` after an aligned address.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = torch.empty(nbytes + shift_bytes, dtype=torch.uint8, device="cpu")
    return typed_view(
        buffer,
        dtype,
        offset=shift_bytes // dtype.itemsize,
        shape=shape,
        stride=row_major(shape) if stride is None else stride,
    )
