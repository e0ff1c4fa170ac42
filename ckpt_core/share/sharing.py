"""Which part of a state this rank stores, worked out from the structure alone.

    private      stored whole by its own rank: RNG states, and what the caller says is `per_rank`
    replicated   equal on all ranks: each rank of the group stores a slice (DeepFreeze IV-A: the shards of
                 replicated tensors are balanced over the data-parallel ranks)
    buffers      of a module: stored by the first rank of the group, whose values DDP takes for all ranks
    distributed  a DTensor's local box; ranks that hold the same box slice it among them

Every rank comes to the same plan without communication; its hash goes into the vote, so that a rank with
another structure is found out before anything is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import prod
from typing import Any

import xxhash

from ckpt_core.errors import ConfigError
from ckpt_core.layout import itemsize, share_leaves, structure_hash
from ckpt_core.share.audit_plan import NO_AUDIT, AuditPlan, Replica
from ckpt_core.share.cuts import Cut
from ckpt_core.share.reference import LeafRow
from ckpt_core.state import FlatState, Leaf
from ckpt_core.types import LeafSpec, Placement, RankInfo, Slice, build_many


@dataclass(frozen=True, slots=True)
class Scope:
    """What the caller says about his state: paths of the tree, each with all that lies below it.

    Attributes:
        per_rank: private to each rank.
        replicated: if given, everything else is private.
    """

    per_rank: tuple[str, ...] = ()
    replicated: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, state: Any, *, per_rank: Iterable[str] | None, replicated: Iterable[str] | None
    ) -> Scope:
        """The scope of `save`'s arguments.

        Raises:
            ConfigError: both are given, or a path starts with something that the state has not.
        """
        if per_rank is not None and replicated is not None:
            raise ConfigError("per_rank= and replicated= exclude each other: give one of them")
        scope = cls(
            _paths("per_rank", per_rank, state) or (), _paths("replicated", replicated, state)
        )
        return scope

    def is_private(self, name: str) -> bool:
        """Whether the caller says that this leaf belongs to its rank alone."""
        if self.replicated is not None:
            return not is_below(name, self.replicated)
        return is_below(name, self.per_rank)


def _paths(field: str, paths: Iterable[str] | None, state: Any) -> tuple[str, ...] | None:
    if paths is None:
        return None
    if isinstance(paths, str) or not isinstance(paths, Iterable):
        raise ConfigError(f"{field}={paths!r} must be a list of paths, such as ['{paths}']")
    found = tuple(paths)
    untyped: tuple[object, ...] = found
    for path in untyped:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{field}: {path!r} is no path of the state, such as 'model.head'")
        first = path.partition(".")[0]
        if isinstance(state, Mapping) and all(
            str(key) != path and str(key).partition(".")[0] != first for key in state
        ):
            known = ", ".join(repr(str(key)) for key in list(state)[:10])
            raise ConfigError(f"{field}: the state has no {path!r}; it has {known}")
    return found


def is_below(name: str, paths: Iterable[str]) -> bool:
    """Whether a leaf is one of these paths of the tree, or below one."""
    return any(name == path or name.startswith(path + ".") for path in paths)


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank stores of one leaf.

    Attributes:
        index: number of the leaf in the flat state.
        stored: name, dtype and shape as they go into the shard's header.
        whole: the leaf that the ranks store together; None for a private one.
        slice: where the part lies in it; None for a private one.
    """

    index: int
    stored: LeafSpec
    whole: LeafSpec | None = None
    slice: Slice | None = None


@dataclass(frozen=True)
class Share:
    """What this rank stores of a state.

    Attributes:
        parts: in the order of the leaves; a leaf that other ranks store has none.
        plan: hash of what must be equal on all ranks; "" in a job of one.
        rows: what that is, without contents; empty in a job of one.
        audit: what this rank looks at of what others store.
        distributed: leaves of which each rank stores what it holds, and where that lies in them; None: it
            stores nothing of one.
    """

    parts: tuple[Part, ...]
    plan: str
    rows: tuple[LeafRow, ...]
    audit: AuditPlan
    distributed: tuple[tuple[LeafSpec, Slice | None], ...] = ()

    @cached_property
    def cut(self) -> Cut | None:
        """What this rank says of them; None: there are none. Worked out once, on a background thread."""
        return Cut.of(self.distributed) if self.distributed else None


class Sharer:
    """Shares states out among the ranks of a job; remembers the last one. One owner, one thread."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        # Swapped as a whole: an interrupt may come between two assignments.
        self._known: tuple[Sequence[LeafSpec], object, Share] | None = None

    def share(self, flat: FlatState, scope: Scope) -> Share:
        """This rank's share, the same object while the structure is. Called on the training thread.

        Raises:
            ConfigError: a distributed tensor is said to be private, or a part of one to be all there is.
        """
        alone = self._info.world_size == 1
        # Whether a leaf is a buffer or of an RNG state is nothing that its spec tells.
        key = (scope, flat.eager, dict(flat.placements), () if alone else flat.origin.owners())
        known = self._known
        # The specs are the very same objects while the structure is (SpecMemo): == is an identity test.
        if known is None or known[0] != flat.specs or known[1] != key:
            known = self._known = (flat.specs, key, self._share(flat, scope))
        return known[2]

    def _share(self, flat: FlatState, scope: Scope) -> Share:
        if self._info.world_size == 1:
            specs = _alone(flat) if flat.placements else flat.specs
            parts = build_many(Part, range(len(specs)), specs, repeat(None), repeat(None))
            return Share(tuple(parts), "", (), NO_AUDIT)
        rng = flat.names_of_rng()
        buffers = flat.names_of_buffers()
        private: list[int] = []
        shared: list[int] = []
        for index, leaf in enumerate(flat.leaves):
            name = leaf.spec.name
            alone = name in rng or scope.is_private(name)
            if alone and name in flat.placements:
                raise ConfigError(
                    f"{name!r} is a DTensor or FlatPart, which ranks store together: take it "
                    f"out of per_rank= (or name it in replicated=)"
                )
            (private if alone else shared).append(index)
        parts = [Part(index, flat.leaves[index].spec) for index in private]
        parts += self._parts(flat, shared, buffers)
        parts.sort(key=lambda part: part.index)
        rows = tuple([_row(flat.leaves[index], flat.placements, buffers) for index in shared])
        # Of all ranks, since nodes may have different numbers of them.
        plan = structure_hash([row[:4] for row in rows], members=self._info.world_size)
        replicas = _replicas(flat, shared, buffers, world_size=self._info.world_size)
        audit = AuditPlan.of(replicas, rows, flat.leaves)
        return Share(tuple(parts), plan, rows, audit, _distributed(flat, shared, parts))

    def _parts(self, flat: FlatState, shared: list[int], buffers: frozenset[str]) -> list[Part]:
        plain = [i for i in shared if flat.leaves[i].spec.name not in flat.placements]
        first_only = {place for place, i in enumerate(plain) if flat.leaves[i].spec.name in buffers}
        members = self._info.members
        places = share_leaves(
            [_size(flat.leaves[index]) for index in plain],
            members=len(members),
            member=members.index(self._info.rank),
            first_only=first_only,
        )
        parts = [
            _part(index, flat.leaves[index].spec, flat.leaves[index].spec, Slice(*place))
            for index, place in zip(plain, places, strict=True)
            if place is not None
        ]
        for index in shared:
            placement = flat.placements.get(flat.leaves[index].spec.name)
            if placement is not None:
                parts += self._box(index, flat.leaves[index], placement)
        return parts

    def _box(self, index: int, leaf: Leaf, placement: Placement) -> list[Part]:
        # A node's root must hold its boxes whole: the other replicas may be on other nodes. So must these
        # ranks theirs where the mesh has more: which replicas are among them is not known.
        ranks = self._info.world_size
        alone = len(self._info.members) != ranks or (placement.ranks or 0) > ranks
        replicas, replica = (1, 0) if alone else (placement.replicas, placement.replica)
        (place,) = share_leaves([_size(leaf)], members=replicas, member=replica)
        if place is None:
            return []
        spec = leaf.spec
        whole = _whole(spec, placement)
        if placement.begin is None:
            return [_part(index, spec, whole, Slice(place[0], place[1], placement.block))]
        begin = placement.begin * itemsize(spec.dtype) + place[0]
        return [_part(index, whole, whole, Slice(begin, place[1], placement.block))]


def _alone(flat: FlatState) -> list[LeafSpec]:
    """Specs of leaves that nobody else has a part of: a distributed one must be the whole."""
    specs = []
    for spec in flat.specs:
        placement = flat.placements.get(spec.name)
        whole = spec if placement is None else _whole(spec, placement)
        if prod(spec.shape) != prod(whole.shape):
            raise ConfigError(
                f"{spec.name!r} is a part of a tensor of {list(whole.shape)}, and no other rank saves with "
                "this Checkpointer: give it coordination= on all ranks, or save the whole tensor"
            )
        specs.append(whole)
    return specs


def _size(leaf: Leaf) -> tuple[int, int]:
    return leaf.nbytes, itemsize(leaf.spec.dtype)


def _part(index: int, spec: LeafSpec, whole: LeafSpec, slice_: Slice) -> Part:
    # Of a leaf without elements a part has all, whatever shape it has here.
    stored = whole
    if slice_.nbytes != prod(whole.shape) * itemsize(spec.dtype):
        stored = LeafSpec(spec.name, spec.dtype, (slice_.nbytes // itemsize(spec.dtype),))
    return Part(index, stored, whole, slice_)


def _row(leaf: Leaf, placements: Mapping[str, Placement], buffers: frozenset[str]) -> LeafRow:
    spec = leaf.spec
    placement = placements.get(spec.name)
    if placement is None:
        return LeafRow(spec.name, spec.dtype, spec.shape, "buffer" if spec.name in buffers else "")
    return LeafRow(spec.name, spec.dtype, placement.shape, placement.kind)


def _distributed(
    flat: FlatState, shared: Iterable[int], parts: Iterable[Part]
) -> tuple[tuple[LeafSpec, Slice | None], ...]:
    placements = flat.placements
    if not placements:
        return ()
    mine = {part.index: part.slice for part in parts}
    named = [(index, flat.leaves[index].spec) for index in shared]
    return tuple(
        [
            (_whole(spec, placements[spec.name]), mine.get(index))
            for index, spec in named
            if spec.name in placements
        ]
    )


def _whole(spec: LeafSpec, placement: Placement) -> LeafSpec:
    """The leaf that ranks store together, of what one of them holds."""
    return LeafSpec(spec.name, spec.dtype, placement.shape)


def _replicas(
    flat: FlatState, shared: Iterable[int], buffers: frozenset[str], *, world_size: int
) -> tuple[Replica, ...]:
    names = [flat.leaves[index].spec.name for index in shared]
    boxes: dict[str, Any] = {}
    for name in names:
        place = flat.placements.get(name)
        if place is not None and _has_others(place, world_size):
            # Ranks at one place of the mesh, seen along the dimensions that split, have all these boxes.
            digest = boxes.setdefault(place.kind, xxhash.xxh3_64())
            digest.update(repr((name, place.block.offsets, place.block.sizes)).encode())
    found = []
    for row, (index, name) in enumerate(zip(shared, names, strict=True)):
        place = flat.placements.get(name)
        if place is None and name not in buffers:
            found.append(Replica(index, row, world_size, "all"))
        elif place is not None and _has_others(place, world_size):
            group = boxes[place.kind].hexdigest()
            found.append(Replica(index, row, place.replicas, group))
    return tuple(found)


def _has_others(place: Placement, world_size: int) -> bool:
    """Whether other ranks may hold this box: replicas, or ranks of another mesh of the same form."""
    return place.replicas > 1 or (place.ranks is not None and place.ranks < world_size)
