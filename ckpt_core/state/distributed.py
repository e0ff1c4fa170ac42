"""DTensors: which box of the whole tensor the local part is; and `FlatPart`, which is a run of its elements.

Nothing here communicates or synchronizes.

`torch.distributed.tensor` takes long to import, so it is never imported here: until somebody else did,
no state can hold a DTensor.

The box is computed here rather than by torch: torch 2.6 gives wrong offsets for strided sharding of
uneven sizes, and later versions go through a tensor of all indices of a dimension.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ckpt_core.errors import ConfigError
from ckpt_core.state.aliasing import Draft, PoolDraft
from ckpt_core.state.leaf import view_key
from ckpt_core.types import Block, Placement

_ADVICE = "save its .full_tensor(), or its .to_local() under per_rank"


class Unplaced(ValueError):
    """A local part is no box or run of the whole that this rank could save or fill."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """A rank's part of a tensor that ranks hold flattened and cut: a run of its elements. It may be empty.

    Stands in a state where the tensor would. All ranks have one in that place; together they hold every
    element, and an element that several of them hold is equal there. A restore fills it, from whatever number
    of ranks and cuts, and another state may have the whole tensor in its place.

    Args:
        tensor: the elements, in one dimension.
        shape: of the whole tensor.
        begin: which of the whole tensor's elements, counted in row-major order, is the first one.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    begin: int

    @property
    def placement(self) -> Placement:
        """Where the part lies in the whole.

        Raises:
            ValueError: it lies outside, or is no run of elements at all. `save` says so in a ConfigError, and
                `restore` in a StateMismatch.
        """
        tensor = self.tensor
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() == 1
        try:
            shape, begin = tuple(map(operator.index, self.shape)), operator.index(self.begin)
        except (TypeError, ValueError, RuntimeError):
            raise self._unplaced() from None
        if not plain or min(shape, default=0) < 0 or not 0 <= begin <= prod(shape) - tensor.numel():
            raise self._unplaced()
        block = Block((0,) * len(shape), shape)
        return Placement(shape, block, 0, 1, "flat parts", begin)

    def _unplaced(self) -> Unplaced:
        sizes = getattr(self.tensor, "shape", ())
        return Unplaced(
            f"is a FlatPart of {self.shape} from element {self.begin} on, and its tensor a "
            f"{type(self.tensor).__name__} of {list(sizes)}: give a run of elements inside that shape, whose "
            f"sizes are ints, as a plain tensor of one dimension"
        )


def is_distributed(cls: type) -> bool:
    """Whether tensors of this type are DTensors."""
    api = sys.modules.get("torch.distributed.tensor._api")
    return api is not None and issubclass(cls, getattr(api, "DTensor", ()))


def local_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank: the local part of a DTensor, any other tensor itself.

    Waits if a collective that the caller has started is still filling it.
    """
    if not is_distributed(type(tensor)):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) is not Tensor and hasattr(local, "wait"):
        local = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


class Placer:
    """Finds the placements of DTensors. Keeps their meshes alive: one for each walk.

    Args:
        known: placements of earlier walks; an equal one is the same object again, so that comparing
            those of ten thousand leaves costs next to nothing.
    """

    def __init__(self, known: dict[Placement, Placement] | None = None) -> None:
        self._known = {} if known is None else known
        self._of: dict[tuple[object, ...], Placement] = {}

    def place(self, tensor: Any) -> tuple[Tensor, Placement]:
        """Local part and placement of a DTensor or a FlatPart.

        Raises:
            Unplaced: says why, and what to do instead.
        """
        if isinstance(tensor, FlatPart):
            return self._place_flat(tensor)
        key = (tensor.device_mesh, tensor.placements, tensor.shape)
        placement = self._of.get(key)
        if placement is None:
            placement = _placement(*key)
            placement = self._of[key] = self._known.setdefault(placement, placement)
        local = local_of(tensor)
        if type(local) is not Tensor:
            raise Unplaced(f"is a DTensor over a {type(local).__name__}: {_ADVICE}")
        if local.layout is torch.strided and local.numel() == 0 == prod(placement.block.sizes):
            return local.view(
                placement.block.sizes
            ), placement  # Torch may note another empty shape.
        if local.layout is not torch.strided or tuple(local.shape) != placement.block.sizes:
            raise Unplaced(
                f"is a DTensor whose local part has shape {list(local.shape)} and layout"
                f" {local.layout}, where {placement.kind} gives {list(placement.block.sizes)}:"
                f" shard it as distribute_tensor() does, or {_ADVICE}"
            )
        return local, placement

    def _place_flat(self, part: FlatPart) -> tuple[Tensor, Placement]:
        placement, local = part.placement, part.tensor.detach()
        # Empty views of one memory would be one leaf.
        local = local if local.numel() else local.new_empty(0)
        return local, self._known.setdefault(placement, placement)


def _placement(mesh: Any, placements: Sequence[Any], shape: torch.Size) -> Placement:
    place, sizes = mesh.get_coordinate(), tuple(mesh.shape)
    if place is None:
        raise Unplaced(
            "is a DTensor on a mesh that this rank is not part of: leave it out of this rank's state"
        )
    kind = _kind(mesh, placements)
    copies = [_outer(mesh)]
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            copies.append((place[axis], sizes[axis]))
        elif _split_dim(placement) is None:
            raise Unplaced(
                f"is a DTensor on {kind}: a {placement} tensor is not yet reduced, or its parts are"
                f" no boxes; .redistribute() it to Shard or Replicate first, or {_ADVICE}"
            )
    box = [
        _range(size, _order(placements, sizes, dim, kind), place, sizes)
        for dim, size in enumerate(shape)
    ]
    replica, replicas = 0, 1
    for index, count in copies:
        replica, replicas = replica * count + index, replicas * count
    block = Block(tuple([begin for begin, _ in box]), tuple([size for _, size in box]))
    ranks = int(_root(mesh).mesh.numel())
    return Placement(tuple(shape), block, replica, replicas, kind, ranks=ranks)


def _kind(mesh: Any, placements: Sequence[Any]) -> str:
    """Equal on all ranks: ranks of a part of a mesh differ in which part, so no rank is named."""
    names = "" if mesh.mesh_dim_names is None else f" ({', '.join(mesh.mesh_dim_names)})"
    split = ", ".join(map(repr, placements))
    return f"a mesh of {list(mesh.shape)}{names} with [{split}]"


def _split_dim(placement: Any) -> int | None:
    """The tensor dimension that Shard or _StridedShard splits, else None."""
    if type(placement).__name__ not in ("Shard", "_StridedShard"):
        return None
    return int(placement.dim)


def _order(placements: Sequence[Any], sizes: Sequence[int], dim: int, kind: str) -> list[int]:
    """Mesh dimensions that split a tensor dimension, in the order in which they did.

    That is left to right, except that a strided one came after as many of those to its right as
    its split factor says: FSDP2 splits what tensor parallelism has split before.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        if _split_dim(placements[axis]) != dim:
            continue
        factor = int(getattr(placements[axis], "split_factor", 1))
        before, parts = 0, 1
        while parts != factor and before < len(order):
            parts *= sizes[order[before]]
            before += 1
        if parts != factor:
            raise Unplaced(f"is a DTensor on {kind}, whose parts are no boxes: {_ADVICE}")
        order.insert(before, axis)
    return order


def _range(
    size: int, order: Sequence[int], place: Sequence[int], sizes: Sequence[int]
) -> tuple[int, int]:
    """Begin and size of a rank's part of a dimension that is split as by torch.chunk, repeatedly."""
    begin = 0
    for axis in order:
        step = -(-size // sizes[axis])
        skipped = min(step * place[axis], size)
        begin, size = begin + skipped, min(step, size - skipped)
    return begin, size


def _outer(mesh: Any) -> tuple[int, int]:
    """Which copy of a part of a larger mesh this is, of how many; (0, 1) for a whole mesh."""
    root = _root(mesh)
    if root.mesh.numel() == mesh.mesh.numel():
        return 0, 1
    inside = set(mesh.mesh.flatten().tolist())
    here = root.get_coordinate()
    index, count = 0, 1
    for axis, size in enumerate(root.shape):
        line = root.mesh[tuple(slice(None) if d == axis else at for d, at in enumerate(here))]
        if size > 1 and inside.isdisjoint(set(line.tolist()) - {int(line[here[axis]])}):
            index, count = index * size + here[axis], count * size
    return index, count


def _root(mesh: Any) -> Any:
    """The mesh that this one is a part of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    resources = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return mesh if resources is None else resources.get_root_mesh(mesh)


def keep_local_parts(
    drafts: Sequence[Draft],
    pools: Sequence[PoolDraft],
    tensors: Sequence[Tensor],
    names: Sequence[str],
    placements: Mapping[int, Placement],
) -> list[PoolDraft]:
    """Strip from local parts what is told of a leaf's memory: their leaf is the whole tensor.

    Returns:
        The pools without any local part.

    Raises:
        ConfigError: a local part shares memory with something that is not the same local part.
    """
    parts = []
    for draft in drafts:
        members = [member for member in draft.members if member >= 0]
        if placements.keys().isdisjoint(members):
            continue
        first = tensors[members[0]]
        if len({(placements.get(m), view_key(tensors[m])) for m in members}) > 1:
            shown = ", ".join(repr(names[m]) for m in members[:4])
            raise ConfigError(
                f"{shown} share memory, one as the local part of a DTensor and another one as"
                " something else: save the DTensor alone"
            )
        draft.stride, draft.shift = None, 0
        if draft.views and draft.first >= 0:  # An expanded local part; its elements are stored.
            draft.tensor = first
            draft.views.clear()
        parts.append(id(draft))
    return [pool for pool in pools if not any(id(draft) in parts for draft, _ in pool.places)]


def check_plain_parts(
    composites: Mapping[int, object], names: Sequence[str], placements: Mapping[int, Placement]
) -> None:
    """Raise ConfigError when the local part of a DTensor is a composite tensor."""
    for index in composites.keys() & placements.keys():
        raise ConfigError(f"{names[index]!r} is a DTensor of an unusual dtype: {_ADVICE}")


def take_box(whole: Tensor, block: Block) -> Tensor:
    """The view of a whole tensor that is that box."""
    for dim, (begin, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return whole
