"""Which leaves came from which kind of object; asked once for each structure, not for each save."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Module

from ckpt_core.state.distributed import local_of
from ckpt_core.state.leaf import view_key
from ckpt_core.state.rng import RngState
from ckpt_core.state.special import decompose, is_uninitialized

_Memory = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensors of a walk, and to which object they belong.

    Attributes:
        segments: (number, object): tensors from that number on belong to the object.
        tensors: by number; parts of composite tensors at the end.
    """

    segments: Sequence[tuple[int, object]] = ()
    tensors: Sequence[Tensor] = ()

    def owners(self) -> tuple[Hashable, ...]:
        """Equal where the names of buffers and RNG states are the same, if those of all leaves are.

        Of a few objects, not of each tensor.
        """
        return tuple(
            (start, isinstance(owner, RngState), *map(weakref.ref, _modules(owner)))
            for start, owner in self.segments
        )

    def names_of_rng(self, leaf: Sequence[str]) -> frozenset[str]:
        """Leaves of `RngState` objects; `leaf` names that of each tensor."""
        segments = [*self.segments, (len(self.tensors), None)]
        return frozenset(
            leaf[index]
            for (start, owner), (stop, _) in pairwise(segments)
            if isinstance(owner, RngState)
            for index in range(start, stop)
        )

    def names_of_buffers(self, leaf: Sequence[str]) -> frozenset[str]:
        """Leaves in the memory of buffers, and not of parameters, of the modules among the objects."""
        modules = list(dict.fromkeys(m for _, owner in self.segments for m in _modules(owner)))
        buffers = {place for module in modules for place in _memories(module.buffers())}
        if not buffers:
            return frozenset()
        parameters = {place for module in modules for place in _memories(module.parameters())}
        places = [_memory(tensor) for tensor in self.tensors]
        held = {leaf[index] for index, place in enumerate(places) if place in buffers}
        return frozenset(held - {leaf[i] for i, place in enumerate(places) if place in parameters})


def _modules(owner: object) -> Iterator[Module]:
    """The module that an object is, or that it wraps."""
    if isinstance(owner, Module):
        yield owner
    elif isinstance(inner := getattr(owner, "module", None), Module):
        yield inner


def _memory(tensor: Tensor) -> _Memory:
    return view_key(tensor)[:2]


def _memories(tensors: Iterable[Tensor]) -> Iterator[_Memory]:
    """Where the bytes of tensors begin, of whatever kind they are."""
    for tensor in map(local_of, tensors):
        if is_uninitialized(tensor) or tensor.is_meta or tensor.is_nested:
            continue
        if tensor.layout is torch.strided:
            yield _memory(tensor)
        else:
            found = decompose(tensor.detach(), "a buffer")
            yield from map(_memory, found[2].values() if found is not None else ())
