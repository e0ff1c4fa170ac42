"""Homes: live memory that takes what a tensor of the checkpoint shows.

Live parameters are filled as `detach` shows them: an interrupt between the calls of `with torch.no_grad():`
would leave gradients off for as long as the process lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_core.state.distributed import is_distributed, local_of, take_box
from ckpt_core.state.leaf import overlaps_itself
from ckpt_core.state.nodes import Ref
from ckpt_core.state.quiet import quietly
from ckpt_core.state.special import PACKED, subbyte_dtypes, take_quantized
from ckpt_core.types import Block, Placement


@dataclass(frozen=True, slots=True)
class Home:
    """A live tensor that must hold what an occurrence shows.

    Attributes:
        number: of the occurrence.
        tensor: plain memory; of a DTensor the local part.
        path: where it is in the live state.
        whole: the DTensor that `tensor` is the local part of.
        block: the box of the occurrence that `tensor` takes; None for all of it.
        begin: of a FlatPart, the first element that it takes, in row-major order.
        array: the numpy array to fill instead, whose strides torch lacks.
        is_live: False: the memory was made for it, and nothing of the live state has it yet.
        is_divided: other ranks hold other parts; the same on every rank, whatever this one has.
    """

    number: Ref
    tensor: Tensor
    path: str
    whole: Tensor | None = None
    block: Block | None = None
    array: Any = None
    begin: int | None = None
    is_live: bool = True
    is_divided: bool = False

    @classmethod
    def of_part(
        cls,
        number: Ref,
        placed: tuple[Tensor, Placement],
        path: str,
        *,
        whole: Tensor | None = None,
        is_live: bool = True,
    ) -> Home:
        """A local part, with its placement, as the home of that part of an occurrence."""
        local, place = placed
        return cls(
            number,
            local,
            path,
            whole,
            None if place.block.sizes == place.shape else place.block,
            begin=place.begin,
            is_live=is_live,
            is_divided=place.is_divided,
        )

    @property
    def is_part(self) -> bool:
        """Whether it is the local part of what ranks hold together."""
        return self.whole is not None or self.begin is not None


def fill_home(home: Home, source: Tensor) -> None:
    """Fill a live tensor or array from the tensor of an occurrence, which may be distributed alike."""
    source = source_of(home, source)
    if home.array is None:
        fill_tensor(home.tensor, source)
    else:
        home.array[...] = source.numpy()


def source_of(home: Home, source: Tensor) -> Tensor:
    """The part of an occurrence's tensor that a home takes."""
    if is_distributed(type(source)):
        source = local_of(source)
    elif home.block is not None:
        source = take_box(source, home.block)
    elif home.begin is not None and source.shape != home.tensor.shape:
        # Else it is such a part itself, or all of a tensor of one dimension.
        source = source.reshape(-1).narrow(0, home.begin, home.tensor.numel())
    return source.detach()


def fill_tensor(home: Tensor, source: Tensor) -> None:
    """Fill a live tensor of any form from one of equal dtype, shape and form."""
    if home.layout is torch.strided and not home.is_quantized:
        home = home.detach()
        if _is_same_memory(home, source):
            return
        for dim, step in enumerate(home.stride()):
            if step == 0 and home.shape[dim] > 1:  # An expanded dimension is one element.
                home, source = home.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if home.dtype in subbyte_dtypes():
            home, source = home.view(torch.uint8), source.view(torch.uint8)
        if overlaps_itself(home.shape, home.stride()):  # Windows over one memory, one at a time.
            for part, rest in zip(home.unbind(), source.unbind(), strict=True):
                fill_tensor(part, rest)
            return
        home.copy_(source)
    else:  # What is sparse gets new memory, what is quantized a scale: an alias would have them alone.
        copy = _copy_packed if home.dtype in PACKED else _copy_unseen
        quietly(lambda: copy(home, source))


def _copy_unseen(home: Tensor, source: Tensor) -> None:
    """Fill a tensor without a record of gradients; the caller puts that back."""
    torch._C._set_grad_enabled(False)
    home.copy_(source)


def _copy_packed(home: Tensor, source: Tensor) -> None:
    """Fill a tensor with several elements to a byte, which torch cannot copy."""
    torch._C._set_grad_enabled(False)
    memory, offset = home.untyped_storage(), int(home.storage_offset())
    shape, stride = home.shape, home.stride()
    home.data = source  # Nothing else gives it the scales of another one.
    home.set_(memory, offset, shape, stride)
    (_, _, into), (_, _, parts) = take_quantized(home), take_quantized(source)
    into["values"].copy_(parts["values"])


def _is_same_memory(home: Tensor, source: Tensor) -> bool:
    """Whether all bits are there already; torch calls it a partial overlap if strides of size 1 differ."""
    if source.layout is not torch.strided or home.data_ptr() != source.data_ptr():
        return False
    bits = home.is_conj() == source.is_conj() and home.is_neg() == source.is_neg()
    rows = zip(home.shape, home.stride(), source.stride(), strict=True)
    return bits and all(size < 2 or step == other for size, step, other in rows)
