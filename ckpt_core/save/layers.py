"""What a layer-wise save stores: planned when it begins, and for what its end brings, when it is sealed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ckpt_core.errors import ConfigError
from ckpt_core.layout import Extent, LayoutBuilder, ShardLayout, nbytes
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.still_files import StillLeaves, still_leaves
from ckpt_core.save.still_group import StillGroup
from ckpt_core.save.unchanged import sharing_for
from ckpt_core.share import (
    Arrangement,
    Audit,
    Auditor,
    Part,
    Placed,
    Scope,
    Share,
    Sharer,
    arrange,
    items_of,
)
from ckpt_core.snapshot import EagerCopies, PoolDemand, StageItem, StagingPool
from ckpt_core.state import FlatState, Leaf, Skeleton, flatten, is_freed
from ckpt_core.system.devices import Queued
from ckpt_core.types import LeafSpec, RankInfo
from ckpt_core.units import count_text


class Given:
    """The tensors that `begin` was given, as leaves of where they lie now: `tensor.data = new` moves them.

    Args:
        leaf_of: name that the caller gave -> leaf of `flat`.

    Attributes:
        leaves: of the flat state; changed in place by `now`.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], flat: FlatState, leaf_of: Mapping[str, Leaf]
    ) -> None:
        self.leaves = list(flat.leaves)
        index = {leaf.spec.name: number for number, leaf in enumerate(flat.leaves)}
        self._of = {
            name: (tensor, index[leaf_of[name].spec.name], _form(tensor))
            for name, tensor in tensors.items()
        }

    def now(self, name: str) -> Leaf:
        """The leaf of a name. Called on the training thread as it is staged.

        Raises:
            ConfigError: its tensor has another shape, dtype or strides since, or no memory any more.
        """
        tensor, index, form = self._of[name]
        leaf, now = self.leaves[index], _form(tensor)
        if now != form:
            raise ConfigError(
                f"stage: {name!r} has (dtype, shape, strides) {now} and had {form} at begin(): abort() this "
                f"save and begin a new one"
            )
        # An alias loses its memory with the tensor: `flatten` says which it is.
        if tensor.data_ptr() != leaf.tensor.data_ptr() or is_freed(tensor):
            (found,) = flatten({name: tensor}, eager_leaf_bytes=0).leaves
            leaf = self.leaves[index] = Leaf(leaf.spec, found.tensor, leaf.eager)
        return leaf


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class LayerwisePlan:
    """Tensors that will be staged one by one.

    Attributes:
        flat: the tensors as a flat state.
        leaf_of: name that the caller gave -> leaf (two names of one tensor share a leaf).
        given: these leaves where they lie now.
        share: what this rank stores of them.
        builder: places each part when its leaf is staged.
        pool: the memory for it.
    """

    flat: FlatState
    leaf_of: Mapping[str, Leaf]
    given: Given
    share: Share
    builder: LayoutBuilder
    pool: StagingPool


@dataclass(frozen=True, slots=True)
class Tail:
    """What `seal` brings, in the order in which it is copied: first what is still live, then clones.

    Attributes:
        skeleton: of the whole state.
        share: what this rank stores of it.
        audit: what it looks at of what others store.
        parts: those of the share, in that order.
        leaves: of the flat state, small and early-changing ones replaced by clones.
        lazy_names: leaf of each item that is still live.
        lazy_items: these, in the same order, at offsets that are not those of a file.
        looked_at: those of which `sharing` wants to know how they look, by these offsets.
        stills: what tends to stay the same, in files of its own.
        behind: what the copies wait for, the clones among it.
    """

    skeleton: Skeleton
    share: Share
    audit: Audit
    parts: tuple[Part, ...]
    leaves: Sequence[Leaf]
    lazy_names: tuple[str, ...]
    lazy_items: tuple[StageItem, ...]
    looked_at: Mapping[int, str]
    stills: tuple[StillLeaves, ...]
    behind: Queued

    @property
    def specs(self) -> list[LeafSpec]:
        """What is stored of each part, in that order."""
        return [part.stored for part in self.parts]


class LayerPlanner:
    """Plans layer-wise saves; remembers the last structures. Used on the training thread.

    Attributes:
        sharing: which leaves that `seal` brings may lie in files of earlier steps.
    """

    def __init__(self, pipeline: Pipeline, auditor: Auditor, info: RankInfo) -> None:
        self._pipeline = pipeline
        self._auditor = auditor
        self._sharer, self._tail_sharer = Sharer(info), Sharer(info)
        self._tail_bytes = 0
        self._arrangement: tuple[Arrangement, tuple[StillGroup, ...]] | None = None
        self.sharing = sharing_for(pipeline.options, pipeline.devices)

    def plan(self, tensors: Mapping[str, torch.Tensor]) -> LayerwisePlan:
        """Lay out tensors whose order is not known yet.

        Raises:
            ConfigError: a name is no text, a value no tensor, or two tensors overlap in memory.
        """
        flat = _flat(tensors)
        leaf_of = _leaves_by_name(tensors, flat)
        share = self._sharer.share(flat, Scope())
        builder = LayoutBuilder([part.stored for part in share.parts])
        demand = self._demand(builder, self._tail_bytes)
        pool = self._pipeline.pool_for(demand)
        given = Given(tensors, flat, leaf_of)
        return LayerwisePlan(flat, leaf_of, given, share, builder, pool)

    def tail(self, plan: LayerwisePlan, state: Any, scope: Scope, *, turn: int) -> Tail:
        """What the state at the end of a save has beside the tensors that are staged already.

        Raises:
            ConfigError: one of these is nowhere in the state, or something in it cannot be saved.
        """
        pipeline, staged = self._pipeline, plan.given.leaves
        flat = flatten(state, eager_leaf_bytes=pipeline.eager_leaf_bytes, staged=staged)
        missing = {leaf.spec.name for leaf in staged} - flat.skeleton.leaf_names()
        if missing:
            raise ConfigError(
                f"seal: staged, but nowhere in the state: {count_text(len(missing), 'tensor')}, first "
                f"{min(missing)!r}: they could not be restored; add them to the state"
            )
        share = self._tail_sharer.share(flat, scope)
        audit = self._auditor.audit(share, flat.leaves, turn)
        copies = pipeline.eager_copies()
        audit.read_eager(pipeline.streams, copies)
        arrangement, groups = self._arranged(flat, share, [leaf.spec.name for leaf in staged])
        stills = still_leaves(flat, arrangement, groups, self.sharing)
        looked_at = frozenset(self.sharing.offsets(arrangement).values())
        return _tail(flat, share, audit, copies, stills=stills, looked_at=looked_at)

    def _arranged(
        self, flat: FlatState, share: Share, staged: Collection[str]
    ) -> tuple[Arrangement, tuple[StillGroup, ...]]:
        groups, known = self.sharing.groups(flat, share, staged), self._arrangement
        if known is None or known[0].share is not share or known[1] is not groups:
            names = [group.names for group in groups]
            known = self._arrangement = arrange(flat, share, names), groups
        return known

    def make_room(self, plan: LayerwisePlan, tail: Tail) -> None:
        """Have memory for the second file of a save, if it must be staged as a whole.

        Raises:
            ConfigError: `staging_bytes` is too small.
        """
        if self._pipeline.options.pipelined or not tail.specs:
            return
        file_bytes = ShardLayout.plan([], tail.specs).file_bytes
        self._pipeline.memory.make_room(plan.pool, self._demand(plan.builder, file_bytes))
        self._tail_bytes = max(self._tail_bytes, file_bytes)

    def _demand(self, builder: LayoutBuilder, tail_bytes: int) -> PoolDemand:
        return self._pipeline.memory.demand_of_layers(
            builder.file_bytes, builder.header_bytes, rest_bytes=tail_bytes
        )


def _flat(tensors: Mapping[str, torch.Tensor]) -> FlatState:
    given: object = tensors
    if not isinstance(given, Mapping):
        raise ConfigError(f"tensors={given!r}: begin() takes a mapping of tensors by name")
    untyped: Mapping[object, object] = dict(tensors.items())
    for name, tensor in untyped.items():
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise ConfigError(
                f"tensors[{name!r}] is a {type(tensor).__name__}: begin() takes tensors by name"
            )
    flat = flatten(dict(tensors), eager_leaf_bytes=0)
    if flat.placements:
        raise ConfigError(
            f"tensors[{min(flat.placements)!r}] is a DTensor: begin() takes plain tensors; give "
            f"distributed ones to seal()"
        )
    return flat


def _leaves_by_name(tensors: Mapping[str, torch.Tensor], flat: FlatState) -> dict[str, Leaf]:
    """Which leaf each of the caller's names stands for."""
    by_name = {leaf.spec.name: leaf for leaf in flat.leaves}
    by_view = {_view(leaf.tensor): leaf for leaf in flat.leaves}
    found = {}
    for name, tensor, occurrence in zip(
        tensors, tensors.values(), flat.skeleton.refs.leaf, strict=False
    ):
        # Tensors without elements are in no memory: their views tell nothing apart.
        leaf = by_view.get(_view(tensor)) if tensor.numel() else by_name.get(occurrence)
        leaf = leaf or by_name.get(name)
        if leaf is None or leaf.spec.shape != tuple(tensor.shape):
            raise ConfigError(
                f"tensors[{name!r}] overlaps another tensor in memory without being the same: a "
                f"layer-wise save takes distinct tensors; pass the one that covers both"
            )
        found[name] = leaf
    return found


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        tensor.numel() and tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _tail(
    flat: FlatState,
    share: Share,
    audit: Audit,
    copies: EagerCopies,
    *,
    stills: tuple[StillLeaves, ...],
    looked_at: Collection[str],
) -> Tail:
    apart = frozenset[str]().union(*(still.group.names for still in stills))
    leaves = list(flat.leaves)
    for part in share.parts:
        leaf = leaves[part.index]
        if leaf.eager:
            leaves[part.index] = Leaf(leaf.spec, copies.of(leaf.tensor), eager=True)
    # Order matters: behind the clones.
    devices = copies.devices
    behind = devices.queued(devices.of_all(leaves[part.index].tensor for part in share.parts))
    lazy = [part for part in share.parts if not leaves[part.index].eager]
    lazy = [part for part in lazy if part.stored.name not in apart]
    eager = [part for part in share.parts if leaves[part.index].eager]
    sizes = [nbytes(part.stored) for part in lazy]
    extents = map(Extent, [part.stored.name for part in lazy], accumulate(sizes, initial=0), sizes)
    named = items_of(
        leaves, [Placed(part, 1, extent) for part, extent in zip(lazy, extents, strict=True)]
    )
    names, items = tuple([name for name, _ in named]), tuple([item for _, item in named])
    looks = {item[1]: name for name, item in named if name in looked_at}
    return Tail(
        *(flat.skeleton, share, audit, (*lazy, *eager), leaves),
        *(names, items, looks, stills, behind),
    )
