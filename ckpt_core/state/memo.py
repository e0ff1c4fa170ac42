"""What `flatten` remembers of a state: while the next one is alike, nothing of it is worked out again.

Alike are trees whose tensors have the same names, kinds, dtypes, shapes, strides and places in storages, by
their values now. Nothing here keeps a tensor, or trusts that an object is still the one it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_

import torch
from torch import Tensor

from ckpt_core.state.eager import larger_than, must_be_eager
from ckpt_core.state.flat import FlatState, straight
from ckpt_core.state.freeze import Walker
from ckpt_core.state.leaf import dtype_name
from ckpt_core.state.nodes import MAX_DIMS, LeafTable, Node, RefTable
from ckpt_core.state.origin import Origin
from ckpt_core.state.runs import Run
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.state.special import refuse_beyond
from ckpt_core.state.traits import Traits
from ckpt_core.types import LeafSpec, Placement, build_many

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_SpecKey = tuple[list[str], list[torch.dtype], list[torch.Size], dict[str, Placement]]


@dataclass(frozen=True, slots=True)
class Shown:
    """How tensors became leaves.

    Attributes:
        firsts: the tensor that each leaf is; None: each tensor is one.
        shared: tensors that were not alone in their storage, or not contiguous.
        odd: leaves that need `straight`.
    """

    firsts: Sequence[int] | None
    shared: list[int]
    odd: Sequence[int]


@dataclass(frozen=True, slots=True)
class Known:
    """What was made of a state.

    Attributes:
        runs, names, flags, placements, arrays: of the walk; see `Walker`.
        traits: of its tensors.
        large: tensors that are not eager for their size alone.
        forced: those that are, all the same, and arrays.
        shown: how they became leaves.
        refs, table: of the skeleton.
        specs, eager, ready, placed: of the leaves; see `FlatState`.
        aliased: tensors that are leaves which are not ready.
    """

    runs: Sequence[Run]
    names: Sequence[str]
    flags: dict[int, str]
    placements: dict[int, Placement]
    arrays: Sequence[int]
    traits: Traits
    large: Sequence[int]
    forced: frozenset[int]
    shown: Shown
    refs: RefTable
    table: LeafTable
    specs: Sequence[LeafSpec]
    eager: Sequence[bool]
    ready: Sequence[bool]
    placed: Mapping[str, Placement]
    aliased: Sequence[bool]

    def again(self, walker: Walker, tree: Node) -> FlatState | None:
        """The state of a walk, if it is like this one; then hardly anything is done for each leaf."""
        found = walker.tensors
        if not self._walked_alike(walker):
            return None
        seen = self.traits.look(found, self.aliased)
        if seen is None or must_be_eager(walker, self.large, {}) != self.forced:
            return None
        (pointers, tensors), firsts = seen, self.shown.firsts
        if firsts is not None:
            tensors = [tensors[first] for first in firsts]
            pointers = [pointers[first] for first in firsts]
        for index in self.shown.odd:
            tensors[index] = straight(tensors[index])
        return FlatState(
            Skeleton(tree, self.refs, self.table),
            self.specs,
            self.eager,
            tensors,
            self.ready,
            pointers,
            self.placed,
            Origin(walker.segments, found),
        )

    def _walked_alike(self, walker: Walker) -> bool:
        return (
            len(walker.runs) == len(self.runs)
            and all(map(is_, walker.runs, self.runs))
            and walker.names == self.names
            and walker.flags == self.flags
            and walker.arrays == self.arrays
            and walker.placements == self.placements
        )


class SpecMemo:
    """What the last state was like, used again while names, dtypes and shapes stay the same.

    Lets the caller see by identity that the structure is the old one. One owner, one thread.
    """

    def __init__(self) -> None:
        # Invariant: what belongs together is swapped in one assignment, since an interrupt may come between
        # two: specs of one state beside the names of another would store its tensors under wrong shapes.
        self.last: Known | None = None
        self.placements: dict[Placement, Placement] = {}
        self._specs: tuple[_SpecKey | None, list[LeafSpec]] = (None, [])

    def specs(
        self, names: list[str], tensors: Sequence[Tensor], placements: dict[str, Placement]
    ) -> list[LeafSpec]:
        """A spec for each tensor; the same list object as last time if nothing changed."""
        key = names, list(map(_dtype, tensors)), list(map(_shape, tensors)), placements
        last_key, specs = self._specs
        if key != last_key:
            if max(map(len, key[2]), default=0) > MAX_DIMS:
                for name, shape in zip(names, key[2], strict=True):
                    refuse_beyond(name, *shape)
            dtypes = map({kind: dtype_name(kind) for kind in set(key[1])}.__getitem__, key[1])
            specs = build_many(LeafSpec, names, dtypes, map(tuple, key[2]))
            # Copies: the caller goes on to use its list of names.
            self._specs = (list(names), *key[1:]), specs
        return specs

    def remember(
        self, flat: FlatState, walker: Walker, shown: Shown, limit: int, forced: frozenset[int]
    ) -> FlatState:
        """Keep what was made of a state without special tensors, and without views made for leaves.

        Returns:
            The state, with what has become known of where its leaves are.
        """
        traits = Traits.of(walker.tensors, shown.shared)
        if traits is None:
            self.last = None
            return flat
        ready = [
            early and tensor.is_cpu and tensor.is_contiguous()
            for early, tensor in zip(flat.eager, flat.tensors, strict=True)
        ]
        for index in shown.odd:
            ready[index] = False
        self.last = Known(
            walker.runs,
            walker.names,
            walker.flags,
            walker.placements,
            walker.arrays,
            traits,
            larger_than(limit, walker.tensors),
            forced,
            shown,
            flat.skeleton.refs,
            flat.skeleton.leaves,
            flat.specs,
            flat.eager,
            ready,
            flat.placements,
            _aliased(ready, shown.firsts, len(walker.tensors)),
        )
        pointers: Sequence[int] = traits.pointers
        if shown.firsts is not None:
            pointers = list(map(pointers.__getitem__, shown.firsts))
        return replace(flat, ready=ready, pointers=pointers)


def _aliased(ready: Sequence[bool], firsts: Sequence[int] | None, count: int) -> Sequence[bool]:
    if firsts is None:
        return [not is_ready for is_ready in ready]
    found = [False] * count
    for first, is_ready in zip(firsts, ready, strict=True):
        found[first] = not is_ready
    return found
