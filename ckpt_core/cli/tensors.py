"""Tensors over the bytes of a step, for what plain copies of bytes cannot do."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_core.cli.tree import Json, TensorRef
from ckpt_core.errors import ConfigError, CorruptCheckpoint
from ckpt_core.layout import itemsize, nbytes
from ckpt_core.restore import RankLeaves, StoredLeaf
from ckpt_core.types import LeafSpec

_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class View:
    """What an occurrence of a tensor shows of its leaf; checked against the leaf's size."""

    leaf: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: str

    @property
    def extent(self) -> range:
        """The bytes of the leaf from the first element that it shows to the last one."""
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        elements = 0 if 0 in self.shape else reach + 1
        return range(self.offset, self.offset + elements * itemsize(self.dtype))

    @classmethod
    def of(cls, tensor: TensorRef, leaf: StoredLeaf) -> View:
        """The view of an occurrence, or of the whole leaf.

        Raises:
            CorruptCheckpoint: it is malformed, or reaches outside the leaf.
        """
        name, spec = leaf.spec.name, leaf.spec
        if tensor.view is None:
            return cls(name, spec.dtype, 0, spec.shape, _row_major(spec.shape), tensor.flags)
        try:
            dtype, offset, shape, stride = tensor.view
            made = cls(name, dtype, offset, _sizes(shape), _sizes(stride), tensor.flags)
            if not _fits(made, leaf.nbytes):
                raise ValueError
            nbytes(LeafSpec(name, dtype, made.shape))
        except (ValueError, TypeError, ConfigError) as exc:
            text = f"the view of the leaf {name!r} is malformed or reaches outside it"
            raise CorruptCheckpoint(text, path=name) from exc
        return made


def view_bytes(view: View, leaves: RankLeaves) -> memoryview:
    """Row-major bytes of a view; what it shows of the leaf and the result are in memory."""
    data = bytearray()
    for block in leaves.blocks(view.leaf, view.extent):  # one by one: the next one overwrites it
        data += block
    kind = dtype_of(view.dtype)
    if not data:
        return memoryview(b"")
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(kind)
    tensor = tensor.as_strided(view.shape, view.stride)
    if "n" in view.flags:
        tensor = torch._neg_view(tensor)
    if "c" in view.flags:
        tensor = tensor.conj()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # A copy: the tensor does not outlive this function.
    return memoryview(bytes(memory_of(tensor)))


def fill(tensor: Tensor, blocks: Iterator[memoryview]) -> None:
    """Fill a CPU tensor of any strides with row-major bytes, of exactly its size."""
    if not tensor.numel():
        return
    flat = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    memory, done = memory_of(flat), 0
    for block in blocks:
        memory[done : done + len(block)] = block
        done += len(block)
    assert done == len(memory)
    if flat is not tensor:
        tensor.copy_(flat)


def memory_of(tensor: Tensor) -> memoryview:
    """Bytes of a contiguous CPU tensor, which the caller keeps alive."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def dtype_of(name: str) -> torch.dtype:
    """A dtype by torch's name.

    Raises:
        ConfigError: this torch has none of that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"torch {torch.__version__} has no dtype {name!r}: use a newer one")
    return found


def _sizes(value: Json) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise ValueError("no sizes")
    if any(type(size) is not int or size < 0 for size in value):
        raise ValueError("no sizes")
    return tuple(value)


def _fits(view: View, leaf_bytes: int) -> bool:
    if type(view.offset) is not int or view.offset < 0 or len(view.shape) != len(view.stride):
        return False
    return view.extent.stop <= leaf_bytes


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
