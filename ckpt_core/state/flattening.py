"""`flatten`: nested state -> ordered leaves and a skeleton.

Runs on the training thread inside `save`, so it works on whole lists of tensors at a time and
copies no tensor; clones of eager leaves are the stager's job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ckpt_core.state.aliasing import Draft, PoolDraft, draft_leaves, find_shared
from ckpt_core.state.distributed import (
    Placer,
    check_plain_parts,
    keep_local_parts,
    local_of,
)
from ckpt_core.state.freeze import Walker, shown
from ckpt_core.state.leaf import Leaf, build_many, dtype_name, row_major
from ckpt_core.state.nodes import Composite, LeafTable, Pool, Ref, RefTable
from ckpt_core.state.origin import Origin
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.state.special import clear_bits, decompose, find_special, part_items
from ckpt_core.types import LeafSpec, Placement

ROOT_NAME = "value"
_RESERVED = "__metadata__"
_PADDING = "__pad__"
_UNIT = ((), (1,))
_nbytes = attrgetter("nbytes")


@dataclass(frozen=True)
class FlatState:
    """A state tree taken apart. Holds on to the live state: not for longer than `save` runs.

    Attributes:
        leaves: every tensor that must be stored, each piece of memory once, in tree order. Of a
            DTensor the local part, whose shape is also that of the spec.
        skeleton: everything else, frozen.
        specs: those of the leaves; not to be changed.
        placements: where the leaves lie that are local parts of DTensors, by name.
    """

    leaves: tuple[Leaf, ...]
    skeleton: Skeleton
    specs: Sequence[LeafSpec]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin, repr=False)

    def names_of_rng(self) -> frozenset[str]:
        """Leaves of `RngState` objects. Computed at each call."""
        return self.origin.names_of_rng(self.skeleton.refs.leaf)

    def names_of_buffers(self) -> frozenset[str]:
        """Leaves that are buffers of modules in the tree, wrapped or not. Computed at each call.

        A module that was given as its `state_dict()` is not known.
        """
        return self.origin.names_of_buffers(self.skeleton.refs.leaf)


_MemoKey = tuple[list[str], list[torch.dtype], list[torch.Size], dict[str, Placement]]


class SpecMemo:
    """The leaf specs of the last state, used again while names, dtypes and shapes stay the same.

    Saves ten thousand allocations on the training thread, and lets the caller see by identity that the
    structure is the old one. One owner, one thread.
    """

    def __init__(self) -> None:
        # Invariant: what belongs together is swapped in one assignment, since an interrupt may come between
        # two: specs of one state beside the key of another would store its tensors under wrong shapes.
        self._last: tuple[_MemoKey | None, list[LeafSpec]] = (None, [])
        self.known: dict[Placement, Placement] = {}

    def specs(
        self, names: list[str], tensors: Sequence[Tensor], placements: dict[str, Placement]
    ) -> list[LeafSpec]:
        """A spec for each tensor; the same list object as last time if nothing changed."""
        key = (
            names,
            list(map(attrgetter("dtype"), tensors)),
            list(map(attrgetter("shape"), tensors)),
            placements,
        )
        last_key, specs = self._last
        if key != last_key:
            dtypes = map({kind: dtype_name(kind) for kind in set(key[1])}.__getitem__, key[1])
            specs = build_many(LeafSpec, names, dtypes, map(tuple, key[2]))
            # Copies: the caller goes on to use its list of names.
            self._last = ((list(names), *key[1:]), specs)
        return specs


def flatten(
    state: Any,
    *,
    eager_leaf_bytes: int,
    staged: Sequence[Leaf] = (),
    memo: SpecMemo | None = None,
) -> FlatState:
    """Take `state` apart. Called by `save` on the training thread; copies no tensor.

    Args:
        state: nested dicts, lists, tensors, plain values and objects with `state_dict()`.
        eager_leaf_bytes: leaves up to this size are eager, whatever they belong to.
        staged: leaves of an earlier call for the same step. Tensors that are the same view as one
            of them refer to it and give no new leaf.
        memo: makes the next call cheaper when the structure is the same.

    Raises:
        ConfigError: something in the tree cannot be stored, or overlaps a staged leaf; names its
            path. Nothing was changed.
    """
    memo = memo or SpecMemo()
    walker = Walker(Placer(memo.known))
    tree = walker.node(state, "")
    refs = RefTable(flags=walker.flags)
    _note_parameters(walker.tensors, refs)
    owners = _take_apart_specials(walker, refs)
    check_plain_parts(refs.composites, walker.names, walker.placements)
    leaf_table = LeafTable()
    shown_staged = [(leaf.spec.name, leaf.tensor) for leaf in staged]
    shared = find_shared(walker.tensors, shown_staged)
    leaf_of: Sequence[int]
    if shared:
        numbered = [(index, walker.tensors[index]) for index in shared]
        drafts, pools = draft_leaves(numbered, walker.names, shown_staged)
        if walker.placements:
            pools = keep_local_parts(drafts, pools, walker.tensors, walker.names, walker.placements)
        names, tensors, leaf_of = _adopt(drafts, walker, refs, staged)
        _describe(drafts, pools, refs, leaf_table, [name for name, _ in shown_staged])
    else:
        tensors, leaf_of = walker.tensors, range(len(walker.tensors))
        names = refs.leaf = unique_names(walker.names, [name for name, _ in shown_staged])
    forced = {leaf_of[index] for index in _must_be_eager(walker, owners, eager_leaf_bytes)}
    placements = {refs.leaf[index]: found for index, found in walker.placements.items()}
    for name, _ in shown_staged:
        placements.pop(name, None)
    specs = memo.specs(names, tensors, placements)
    leaves = _make_leaves(specs, tensors, forced, eager_leaf_bytes)
    origin = Origin(walker.segments, walker.tensors)
    skeleton = Skeleton(tree, refs, leaf_table)
    return FlatState(tuple(leaves), skeleton, specs, placements, origin)


def _note_parameters(tensors: list[Tensor], refs: RefTable) -> None:
    if Parameter not in set(map(type, tensors)) and not any(
        map(attrgetter("requires_grad"), tensors)
    ):
        return
    for index, tensor in enumerate(tensors):
        if type(tensor) is Parameter:
            refs.flags[index] = "pg" if tensor.requires_grad else "p"
        elif tensor.requires_grad and tensor.is_leaf:
            refs.flags[index] = "g"


def _take_apart_specials(walker: Walker, refs: RefTable) -> dict[int, int]:
    """Replace tensors that have no plain memory by their parts; part number -> owner's number."""
    owners: dict[int, int] = {}
    for index in find_special(walker.tensors):
        name = walker.names[index]
        tensor, bits = clear_bits(walker.tensors[index].detach())
        if bits:
            refs.flags[index] = refs.flags.get(index, "") + bits
        found = decompose(tensor, shown(name))
        if found is None:
            walker.tensors[index] = tensor
            continue
        kind, meta, parts = found
        composite = Composite(kind, meta, {"values": Ref(index)})
        walker.tensors[index] = parts["values"]
        for part_name, part in part_items(parts):
            number = walker.ref(part, f"{name or ROOT_NAME}.{part_name}")
            composite.parts[part_name] = number
            owners[number] = index
        refs.composites[index] = composite
    return owners


def _adopt(
    drafts: list[Draft], walker: Walker, refs: RefTable, staged: Sequence[Leaf]
) -> tuple[list[str], list[Tensor], list[int]]:
    """Names and tensors of the new leaves, in tree order, and the leaf of each occurrence."""
    inside = {member for draft in drafts for member in draft.members}
    inside -= {draft.first for draft in drafts}
    firsts = [index for index in range(len(walker.tensors)) if index not in inside]
    taken = [leaf.spec.name for leaf in staged]
    names = unique_names([walker.names[index] for index in firsts], taken)
    tensors = [walker.tensors[index] for index in firsts]
    leaf_of = [-1] * len(walker.tensors)
    refs.leaf = [""] * len(walker.tensors)
    for number, (first, name) in enumerate(zip(firsts, names, strict=True)):
        leaf_of[first], refs.leaf[first] = number, name
    for draft in drafts:
        number = leaf_of[draft.first] if draft.first >= 0 else -1
        name = names[number] if number >= 0 else taken[-1 - draft.first]
        if number >= 0:
            tensors[number] = draft.tensor
        for member in draft.members:
            if member >= 0:
                leaf_of[member], refs.leaf[member] = number, name
    return names, tensors, leaf_of


def _describe(
    drafts: list[Draft],
    pools: list[PoolDraft],
    refs: RefTable,
    table: LeafTable,
    taken: Sequence[str],
) -> None:
    """Note in the tables what is not plain about the drafts."""

    def name_of(draft: Draft) -> str:
        return refs.leaf[draft.first] if draft.first >= 0 else taken[-1 - draft.first]

    for draft in drafts:
        refs.views.update({member: view for member, view in draft.views.items() if member >= 0})
        if draft.stride is not None:
            table.strides[name_of(draft)] = draft.stride
        if draft.shift:
            table.shifts[name_of(draft)] = draft.shift
    for pool in pools:
        offsets = {name_of(draft): offset for draft, offset in pool.places}
        table.pools.append(Pool(pool.nbytes, offsets))


def _must_be_eager(walker: Walker, owners: dict[int, int], limit: int) -> Iterable[int]:
    """Big tensors that training may change before the barrier: no optimizer step owns them."""
    yield from walker.arrays
    segments = [*walker.segments, (len(walker.tensors), None)]
    objects = [owner for _, owner in segments if owner is not None]
    if all(isinstance(owner, torch.optim.Optimizer) for owner in objects):
        return
    parameters = _Parameters()
    forced: set[int] = set()
    for (start, owner), (stop, _) in pairwise(segments):
        if owner is None or isinstance(owner, torch.optim.Optimizer):
            continue
        for index in range(start, stop):
            tensor = walker.tensors[index]
            if tensor.nbytes > limit and not parameters.hold(tensor, index, owner):
                forced.add(index)
    for part, owner_index in owners.items():
        if owner_index in forced:
            forced.add(part)
    yield from forced


class _Parameters:
    """Knows which memory belongs to parameters of the modules in the tree."""

    def __init__(self) -> None:
        self._of: dict[int, set[int]] = {}

    def hold(self, tensor: Tensor, index: int, owner: object) -> bool:
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


def _make_leaves(
    specs: list[LeafSpec], tensors: Sequence[Tensor], forced: set[int], limit: int
) -> list[Leaf]:
    eager = list(map(limit.__ge__, map(_nbytes, tensors)))
    for index in forced:
        if index >= 0:
            eager[index] = True
    # An alias, not the tensor itself: `tensor.data = other` must not change what is staged.
    aliases = list(map(Tensor.detach, tensors))
    # Where sizes are 1, a contiguous tensor may have any strides; nobody below should meet those.
    odd = {stride for stride in set(map(Tensor.stride, aliases)) if stride[-1:] not in _UNIT}
    for index, alias in enumerate(aliases) if odd else ():
        if alias.stride() in odd and alias.is_contiguous():
            aliases[index] = alias.as_strided(alias.shape, row_major(alias.shape))
    return build_many(Leaf, specs, aliases, eager)


def unique_names(paths: Sequence[str], taken: Iterable[str]) -> list[str]:
    """Leaf names from tree paths: UTF-8 without NUL, none reserved, twice or in `taken`."""
    names = list(paths)
    text = "\n".join(names)
    if "\0" in text or not _is_utf8(text):
        names = [_escaped(name) for name in names]
    if "" in names or _PADDING in text:
        names = [_unreserved(name) for name in names]
    used = {_RESERVED, *taken}
    if used.isdisjoint(names) and len(set(names)) == len(names):
        return names
    counts = Counter(names)
    for index, name in enumerate(names):
        number = 0
        while names[index] in used or (number and names[index] in counts):
            number += 1
            names[index] = f"{name}~{number}"
        used.add(names[index])
    return names


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escaped(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _unreserved(name: str) -> str:
    return "~" + name if name.startswith(_PADDING) else name or ROOT_NAME
