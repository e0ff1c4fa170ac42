"""`FlatState`: what `flatten` makes of a state tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ckpt_core.state.leaf import Leaf, row_major
from ckpt_core.state.origin import Origin
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.types import LeafSpec, Placement, build_many

_UNIT = ((), (1,))


@dataclass(frozen=True)
class FlatState:
    """A state tree taken apart. Holds on to the live state: not for longer than `save` runs.

    Attributes:
        skeleton: everything but the leaves, frozen.
        specs: of the leaves, which are every tensor that must be stored, each piece of memory once, in tree
            order; not to be changed. Of a DTensor the local part, whose shape is also that of the spec.
        eager: of each leaf; not to be changed.
        tensors: of each leaf, as in `Leaf`. Danger: of a leaf with a pointer the live tensor itself, which is
            read before `save` returns.
        ready: for each leaf, whether `pointers` tells where its row-major bytes are, in host memory.
        pointers: one for each leaf; empty where nothing is ready.
        placements: where the leaves lie that are local parts of DTensors, by name.
    """

    skeleton: Skeleton
    specs: Sequence[LeafSpec]
    eager: Sequence[bool]
    tensors: Sequence[Tensor]
    ready: Sequence[bool] = ()
    pointers: Sequence[int] = ()
    placements: Mapping[str, Placement] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin, repr=False)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves. Made at the first call."""
        plain = list(map(Tensor.detach, self.tensors)) if self.pointers else self.tensors
        return tuple(build_many(Leaf, self.specs, plain, self.eager))

    def names_of_rng(self) -> frozenset[str]:
        """Leaves of `RngState` objects. Computed at each call."""
        return self.origin.names_of_rng(self.skeleton.refs.leaf)

    def names_of_buffers(self) -> frozenset[str]:
        """Leaves that are buffers of modules in the tree, wrapped or not. Computed at each call.

        A module that was given as its `state_dict()` is not known.
        """
        return self.origin.names_of_buffers(self.skeleton.refs.leaf)


def aliases(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Not the tensors themselves: `tensor.data = other` must not change what is staged.

    Returns:
        With them which of them had odd strides: a contiguous tensor may have any where sizes are 1, and
        nobody below should meet those.
    """
    made = list(map(Tensor.detach, tensors))
    strange = {stride for stride in set(map(Tensor.stride, made)) if stride[-1:] not in _UNIT}
    odd = [
        index
        for index, alias in enumerate(made if strange else ())
        if alias.stride() in strange and alias.is_contiguous()
    ]
    for index in odd:
        made[index] = straight(made[index])
    return made, odd


def straight(tensor: Tensor) -> Tensor:
    """The same memory, with the strides that its shape has when it is alone."""
    return tensor.as_strided(tensor.shape, row_major(tensor.shape))
