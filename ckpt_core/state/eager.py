"""Which large leaves must be copied inside `save`: those that training may change before the barrier."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from ckpt_core.state.distributed import local_of
from ckpt_core.state.freeze import Walker


def larger_than(limit: int, tensors: Sequence[Tensor]) -> list[int]:
    """Indices of tensors of more bytes."""
    return [index for index, tensor in enumerate(tensors) if tensor.nbytes > limit]


def must_be_eager(
    walker: Walker, large: Sequence[int], owners: Mapping[int, int]
) -> frozenset[int]:
    """Tensors that are eager whatever their size: of arrays, and of what no optimizer step owns.

    Args:
        large: those that are not eager for their size alone, ascending.
        owners: the tensor of each part of one.
    """
    parameters = _Parameters()
    forced: set[int] = set()
    for (start, owner), (stop, _) in pairwise([*walker.segments, (len(walker.tensors), None)]):
        if owner is None or isinstance(owner, torch.optim.Optimizer):
            continue
        for index in large[bisect_left(large, start) : bisect_left(large, stop)]:
            if not parameters.hold(walker.tensors[index], owner):
                forced.add(index)
    parts = [part for part, owner_index in owners.items() if owner_index in forced]
    return frozenset([*walker.arrays, *forced, *parts])


class _Parameters:
    """Knows which memory belongs to parameters of the modules in the tree."""

    def __init__(self) -> None:
        self._of: dict[int, set[int]] = {}

    def hold(self, tensor: Tensor, owner: object) -> bool:
        """Whether this tensor of `owner` is a parameter."""
        if type(tensor) is Parameter:
            return True
        if not isinstance(owner, torch.nn.Module):
            return False
        known = self._of.get(id(owner))
        if known is None:
            known = self._of[id(owner)] = {
                local_of(parameter).untyped_storage()._cdata
                for parameter in owner.parameters()
                if parameter.layout is torch.strided
            }
            for buffer in owner.buffers():
                if buffer.layout is torch.strided:
                    known.discard(buffer.untyped_storage()._cdata)
        return tensor.untyped_storage()._cdata in known
