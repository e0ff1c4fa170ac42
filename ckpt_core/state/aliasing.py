"""Which tensors share memory: one leaf for each piece of memory, views for everything else.

    identical views                      one leaf, several references
    overlapping views, expanded views    one 1-D *span* leaf over the union of their bytes
    disjoint views of one storage        a leaf each, and a *pool* that puts them together again

Reads only what tensors know about themselves (storage, offset, shape, strides): device memory is
not touched and nothing synchronizes. Source: DeepFreeze (CCGrid '20) IV-A c, extended to views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from ckpt_core.errors import ConfigError
from ckpt_core.state.leaf import (
    dtype_name,
    extent,
    meeting,
    overlaps_itself,
    row_major,
    typed_view,
    view_key,
)
from ckpt_core.state.nodes import View

_POOL_ALIGN = 16
_storage_id = attrgetter("_cdata")


@dataclass(slots=True)
class Draft:
    """A leaf to be: `first` is the occurrence that names it, below zero for a staged leaf."""

    first: int
    tensor: Tensor
    members: list[int]
    stride: tuple[int, ...] | None = None
    shift: int = 0
    views: dict[int, View] = field(default_factory=dict)


@dataclass(slots=True)
class PoolDraft:
    """Leaves of one storage: bytes, and (draft, offset) of each."""

    nbytes: int
    places: list[tuple[Draft, int]]


@dataclass(slots=True)
class _Place:
    """One distinct view of a storage."""

    index: int
    tensor: Tensor
    members: list[int]
    low: int
    high: int
    draft: Draft | None = None

    @property
    def staged(self) -> bool:
        return self.index < 0


def find_shared(tensors: Sequence[Tensor], staged: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Indices of tensors that `draft_leaves` must look at; the others are leaves as they are.

    Those are nearly all tensors of nearly every state, so this works on whole lists.
    """
    ids = list(map(_storage_id, map(Tensor.untyped_storage, tensors)))
    contiguous = list(map(Tensor.is_contiguous, tensors))
    if not staged and len(set(ids)) == len(ids) and all(contiguous):
        return []
    counts = Counter(ids)
    counts.update(tensor.untyped_storage()._cdata for _, tensor in staged)
    return [
        index
        for index, (key, plain) in enumerate(zip(ids, contiguous, strict=True))
        if not plain or counts[key] > 1
    ]


def draft_leaves(
    tensors: Sequence[tuple[int, Tensor]],
    names: Sequence[str],
    staged: Sequence[tuple[str, Tensor]],
) -> tuple[list[Draft], list[PoolDraft]]:
    """Leaves of these numbered tensors, and the pools among them.

    Staged leaves take part with the numbers -1, -2, ... and keep them in `first`.

    Raises:
        ConfigError: a tensor shares some memory with a staged leaf but is not the same view.
    """
    groups: dict[int, list[tuple[int, Tensor]]] = {}
    numbered = [(-1 - number, tensor) for number, (_, tensor) in enumerate(staged)]
    numbered.extend(tensors)
    for item in numbered:
        groups.setdefault(item[1].untyped_storage()._cdata, []).append(item)
    drafts: list[Draft] = []
    pools: list[PoolDraft] = []
    labels = {-1 - number: name for number, (name, _) in enumerate(staged)}
    for group in groups.values():
        if len(group) == 1:
            index, tensor = group[0]
            if tensor.is_contiguous():
                drafts.append(Draft(index, tensor, [index]))
            else:
                drafts.append(_alone(_place(index, tensor)))
        else:
            _share(group, drafts, pools, labels, names)
    return drafts, pools


def _place(index: int, tensor: Tensor) -> _Place:
    low = int(tensor.storage_offset()) * tensor.itemsize
    size = extent(tensor.shape, tensor.stride()) * tensor.itemsize
    return _Place(index, tensor, [index], low, low + size)


def _share(
    group: list[tuple[int, Tensor]],
    drafts: list[Draft],
    pools: list[PoolDraft],
    labels: dict[int, str],
    names: Sequence[str],
) -> None:
    """Leaves of tensors that lie in one storage."""
    distinct: dict[Hashable, _Place] = {}
    for index, tensor in group:
        key = view_key(tensor)
        if key in distinct:
            distinct[key].members.append(index)
        else:
            distinct[key] = _place(index, tensor)
    placed: list[_Place] = []
    for cluster in _clusters(list(distinct.values())):
        placed += _resolve(cluster, labels, names)
    drafts += [place.draft for place in placed if place.draft is not None]
    pool = _pool(placed)
    if pool is not None:
        pools.append(pool)


def _clusters(places: list[_Place]) -> list[list[_Place]]:
    """Places whose byte ranges meet; empty ones stand alone."""
    empty = [[place] for place in places if place.low == place.high]
    full = [place for place in places if place.low < place.high]
    full.sort(key=lambda place: (place.low, place.index))
    return empty + meeting(full, lambda place: (None, place.low, place.high))


def _resolve(cluster: list[_Place], labels: dict[int, str], names: Sequence[str]) -> list[_Place]:
    """The cluster's places with drafts; one place when they become a span."""
    if len(cluster) > 1 and not all(place.staged for place in cluster):
        low = min(place.low for place in cluster)
        high = max(place.high for place in cluster)
        if 2 * sum(place.tensor.nbytes for place in cluster) >= high - low or not _interleaved(
            cluster
        ):
            return [_span(cluster, low, high, labels, names)]
    for place in cluster:
        place.draft = _alone(place)
    return cluster


def _alone(place: _Place) -> Draft:
    """The leaf of a view that overlaps no other one."""
    tensor, members = place.tensor, place.members
    if tensor.is_contiguous():
        return Draft(place.index, tensor, members)
    shape, stride = tuple(tensor.shape), tensor.stride()
    if not overlaps_itself(shape, stride):
        dense = extent(shape, stride) == tensor.numel()
        return Draft(place.index, tensor, members, stride=stride if dense else None)
    base_shape = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    if overlaps_itself(base_shape, stride):
        view = View(dtype_name(tensor.dtype), 0, shape, stride)
        size = extent(shape, stride)
        tensor = tensor.as_strided((size,), (1,), tensor.storage_offset())
    else:
        rows = row_major(base_shape)
        steps = tuple(0 if step == 0 else row for row, step in zip(rows, stride, strict=True))
        view = View(dtype_name(tensor.dtype), 0, shape, steps)
        tensor = tensor.as_strided(base_shape, stride, tensor.storage_offset())
    return Draft(place.index, tensor, members, views=dict.fromkeys(members, view))


def _interleaved(cluster: list[_Place]) -> bool:
    """Whether the views are blocks of columns of one matrix, so that no byte is in two of them."""
    if len({place.tensor.dtype for place in cluster}) > 1:
        return False
    columns: list[tuple[int, int]] = []
    pitches: set[int] = set()
    for place in cluster:
        sizes = sorted(
            (step, size)
            for step, size in zip(place.tensor.stride(), place.tensor.shape, strict=True)
            if size > 1
        )
        if not sizes:
            return False
        pitch = sizes[-1][0]
        start = int(place.tensor.storage_offset()) % pitch if pitch else 0
        width = 1 + sum(step * (size - 1) for step, size in sizes[:-1])
        pitches.add(pitch)
        columns.append((start, start + width))
    columns.sort()
    ends = [*(start for start, _ in columns[1:]), *pitches]
    return len(pitches) == 1 and all(
        high <= end for (_, high), end in zip(columns, ends, strict=True)
    )


def _span(
    cluster: list[_Place], low: int, high: int, labels: dict[int, str], names: Sequence[str]
) -> _Place:
    """One leaf over all bytes from `low` to `high`, and a view of it for each occurrence."""
    cluster = sorted(cluster, key=lambda place: (not place.staged, place.index))
    first = cluster[0]
    if first.staged:
        others = [place for place in cluster if not place.staged]
        reach = (min(place.low for place in others), max(place.high for place in others))
        whole = first.tensor.is_contiguous() and (first.low, first.high) == (low, high) == reach
        if cluster[1].staged or not whole:
            raise ConfigError(
                f"{names[cluster[1].index]!r} overlaps the memory of {labels[first.index]!r}, which"
                " was staged before, without being the same view: stage both, or neither"
            )
        draft = Draft(first.index, first.tensor, [])
    else:
        draft = _span_draft(cluster, low, high)
    for place in cluster:
        draft.members += place.members
        if place is first and first.staged:
            continue
        tensor = place.tensor
        name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        view = View(name, place.low - low, shape, tensor.stride())
        draft.views.update(dict.fromkeys(place.members, view))
    return _Place(draft.first, draft.tensor, draft.members, low, high, draft)


def _span_draft(cluster: list[_Place], low: int, high: int) -> Draft:
    tensor = cluster[0].tensor
    same = all(place.tensor.dtype is tensor.dtype for place in cluster)
    dtype = tensor.dtype if same else torch.uint8
    size = (high - low) // dtype.itemsize
    offset = low // dtype.itemsize
    span = typed_view(tensor, dtype, offset=offset, shape=(size,), stride=(1,))
    return Draft(cluster[0].index, span, [], shift=0 if same else low % _POOL_ALIGN)


def _pool(placed: list[_Place]) -> PoolDraft | None:
    """The places that can share one storage again, if that does not waste memory."""
    dense = [
        place
        for place in placed
        if place.draft is not None
        and place.low < place.high
        and place.draft.tensor.nbytes == place.high - place.low
    ]
    if len(dense) < 2:
        return None
    start = min(place.low for place in dense) // _POOL_ALIGN * _POOL_ALIGN
    nbytes = max(place.high for place in dense) - start
    if 2 * sum(place.high - place.low for place in dense) < nbytes - _POOL_ALIGN:
        return None
    places = [(place.draft, place.low - start) for place in dense if place.draft is not None]
    return PoolDraft(nbytes, places)
