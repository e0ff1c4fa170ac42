"""`flatten`: nested state -> ordered leaves and a skeleton.

Runs on the training thread inside `save`, so it works on whole lists of tensors at a time and
copies no tensor; clones of eager leaves are the stager's job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ckpt_core.errors import ConfigError
from ckpt_core.state.aliasing import Draft, PoolDraft, draft_leaves, find_shared
from ckpt_core.state.distributed import Placer, check_plain_parts, keep_local_parts
from ckpt_core.state.eager import larger_than, must_be_eager
from ckpt_core.state.flat import FlatState, aliases
from ckpt_core.state.freeze import Walker, shown
from ckpt_core.state.leaf import Leaf
from ckpt_core.state.memo import Shown, SpecMemo
from ckpt_core.state.memory import first_cut, first_freed, refuse_fake
from ckpt_core.state.nodes import Composite, LeafTable, Pool, Ref, RefTable
from ckpt_core.state.origin import Origin
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.state.special import clear_bits, decompose, find_special, part_items, refuse_beyond

ROOT_NAME = "value"
_RESERVED = "__metadata__"
_PADDING = "__pad__"
_nbytes = attrgetter("nbytes")


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
    refuse_fake()
    try:
        return _flatten(state, eager_leaf_bytes, staged, memo or SpecMemo())
    except RuntimeError as exc:
        if not _is_in_function():
            raise
        raise ConfigError(
            "inside torch.func (vmap, grad, ...) tensors have no bytes: save where the function is called"
        ) from exc


def _flatten(
    state: Any, eager_leaf_bytes: int, staged: Sequence[Leaf], memo: SpecMemo
) -> FlatState:
    last = None if staged else memo.last
    walker = Walker(Placer(memo.placements), last.runs if last else ())
    tree = walker.node(state, "")
    flat = None if last is None else last.again(walker, tree)
    if flat is not None:
        return flat
    refs = RefTable(flags=dict(walker.flags))
    _note_parameters(walker.tensors, refs)
    special = find_special(walker.tensors)
    owners = _take_apart(special, walker, refs)
    check_plain_parts(refs.composites, walker.names, walker.placements)
    found = _leaves_of(walker, refs, staged)
    tensors, firsts = found.tensors, found.firsts
    forced = must_be_eager(walker, larger_than(eager_leaf_bytes, walker.tensors), owners)
    placements = {refs.leaf[index]: found for index, found in walker.placements.items()}
    for leaf in staged:
        placements.pop(leaf.spec.name, None)
    specs = memo.specs(found.names, tensors, placements)
    eager = _eager(found, forced, eager_leaf_bytes)
    plain, odd = aliases(tensors)
    _refuse(first_freed(plain, list(map(Tensor.data_ptr, plain))), found.names, plain)
    skeleton = Skeleton(tree, refs, found.table)
    origin = Origin(walker.segments, walker.tensors)
    flat = FlatState(skeleton, specs, eager, plain, placements=placements, origin=origin)
    if not (staged or special) and (firsts is None or _are_those(tensors, walker.tensors, firsts)):
        kept = Shown(firsts, found.shared, odd)
        return memo.remember(flat, walker, kept, eager_leaf_bytes, forced)
    return flat


@dataclass(frozen=True, slots=True)
class _Found:
    """The new leaves of a walk.

    Attributes:
        names, tensors: of each.
        firsts: the occurrence that each is; None: each occurrence is one.
        leaf_of: the leaf of each occurrence.
        shared: occurrences that are not alone in their storage, or not contiguous.
        table: what is not plain about the leaves.
    """

    names: list[str]
    tensors: list[Tensor]
    firsts: Sequence[int] | None
    leaf_of: Sequence[int]
    shared: list[int]
    table: LeafTable


def _leaves_of(walker: Walker, refs: RefTable, staged: Sequence[Leaf]) -> _Found:
    table, taken = LeafTable(), [leaf.spec.name for leaf in staged]
    shown_staged = [(leaf.spec.name, leaf.tensor) for leaf in staged]
    try:
        shared = find_shared(walker.tensors, shown_staged)
    except NotImplementedError as exc:
        if _is_in_function():
            raise
        raise _without_storage(walker) from exc
    _refuse(first_cut(walker.tensors, shared), walker.names, walker.tensors)
    if not shared:
        names = refs.leaf = unique_names(walker.names, taken)
        return _Found(names, walker.tensors, None, range(len(walker.tensors)), shared, table)
    numbered = [(index, walker.tensors[index]) for index in shared]
    drafts, pools = draft_leaves(numbered, walker.names, shown_staged)
    if walker.placements:
        pools = keep_local_parts(drafts, pools, walker.tensors, walker.names, walker.placements)
    names, tensors, firsts, leaf_of = _adopt(drafts, walker, refs, staged)
    _describe(drafts, pools, refs, table, taken, walker.names)
    return _Found(names, tensors, firsts, leaf_of, shared, table)


def _eager(found: _Found, forced: Iterable[int], eager_leaf_bytes: int) -> list[bool]:
    """Of each leaf whether it is copied at once: it is small, or one of these occurrences."""
    eager = list(map(eager_leaf_bytes.__ge__, map(_nbytes, found.tensors)))
    for index in {found.leaf_of[index] for index in forced} - {-1}:
        eager[index] = True
    return eager


def _are_those(tensors: Iterable[Tensor], found: Sequence[Tensor], firsts: Sequence[int]) -> bool:
    """Whether no view was made for a leaf."""
    return all(map(is_, tensors, map(found.__getitem__, firsts)))


def _is_in_function() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _without_storage(walker: Walker) -> ConfigError:
    """Of the first tensor that torch gives no storage for, such as one that has leaked out of a vmap."""
    for name, tensor in zip(walker.names, walker.tensors, strict=True):
        try:
            tensor.untyped_storage()
        except NotImplementedError as exc:
            text = f"{shown(name)} has no bytes here ({exc}): store what it was made of"
            return ConfigError(text)
    return ConfigError("a tensor of the state has no bytes here")


def _refuse(freed: int | None, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    if freed is not None:
        left = tensors[freed].untyped_storage().nbytes()
        raise ConfigError(
            f"{shown(names[freed])}: its memory has been freed (a storage of {left} bytes), as FSDP does "
            f"with what is not in use: pass the state_dict() of the wrapper, or save when it is back"
        )


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


def _take_apart(special: Iterable[int], walker: Walker, refs: RefTable) -> dict[int, int]:
    """Replace tensors that have no plain memory by their parts; part number -> owner's number."""
    owners: dict[int, int] = {}
    for index in special:
        name = walker.names[index]
        tensor, bits = clear_bits(walker.tensors[index].detach())
        if bits:
            refs.flags[index] = refs.flags.get(index, "") + bits
        found = decompose(tensor, shown(name))
        if found is None:
            walker.tensors[index] = tensor
            continue
        kind, meta, parts = found
        refuse_beyond(name, *meta.get("shape", ()))
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
) -> tuple[list[str], list[Tensor], list[int], list[int]]:
    """Names, tensors and first occurrences of the new leaves, in tree order, and each one's leaf."""
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
    return names, tensors, firsts, leaf_of


def _describe(
    drafts: list[Draft],
    pools: list[PoolDraft],
    refs: RefTable,
    table: LeafTable,
    taken: Sequence[str],
    names: Sequence[str],
) -> None:
    """Note in the tables what is not plain about the drafts."""

    def name_of(draft: Draft) -> str:
        return refs.leaf[draft.first] if draft.first >= 0 else taken[-1 - draft.first]

    for draft in drafts:
        for member, view in draft.views.items():
            if member >= 0:
                refuse_beyond(names[member], *view.shape, elements=math.prod(view.shape))
                refuse_beyond(names[member], *view.stride)
        if draft.stride is not None:
            refuse_beyond(name_of(draft), *draft.stride)
        refs.views.update({member: view for member, view in draft.views.items() if member >= 0})
        if draft.stride is not None:
            table.strides[name_of(draft)] = draft.stride
        if draft.shift:
            table.shifts[name_of(draft)] = draft.shift
    for pool in pools:
        offsets = {name_of(draft): offset for draft, offset in pool.places}
        table.pools.append(Pool(pool.nbytes, offsets))


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
