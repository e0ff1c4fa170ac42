"""What stays the same while the structure of a state does: worked out once, used by every save."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, repeat
from operator import attrgetter, not_

from torch import Tensor

from ckpt_core.layout import Extent, ShardLayout
from ckpt_core.share.sharing import Part, Share
from ckpt_core.snapshot import Items, StageItem
from ckpt_core.state import FlatState, Leaf, blocks
from ckpt_core.types import LeafSpec, build_many

_index, _slice = attrgetter("part.index"), attrgetter("part.slice")
_name, _offset, _nbytes = map(attrgetter, ("extent.name", "extent.offset", "extent.nbytes"))


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a leaf in a shard file of this rank."""

    part: Part
    file: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Whole:
    """Leaves that lie whole in a file, one column for each thing that is known of them, in file order.

    Attributes:
        indices: their numbers in the flat state.
        offsets, sizes: where their bytes go.
    """

    indices: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]

    def items(self, tensors: Sequence[Tensor]) -> Items:
        """What is copied, of the tensors of all leaves."""
        return Items(list(map(tensors.__getitem__, self.indices)), self.offsets, self.sizes)


@dataclass(frozen=True)
class StillPart:
    """A shard file of leaves that tend to stay the same, and the parts in it, in file order."""

    layout: ShardLayout
    placed: tuple[Placed, ...]

    @cached_property
    def _whole(self) -> Whole | None:
        return _whole(self.placed)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(map(_name, self.placed))

    def items(self, flat: FlatState) -> tuple[tuple[str, ...], Sequence[StageItem]]:
        """What is copied, and the leaf of each."""
        if self._whole is not None:
            return self._names, self._whole.items(flat.tensors)
        named = items_of(flat.leaves, self.placed)
        return tuple([name for name, _ in named]), [item for _, item in named]


@dataclass(frozen=True)
class Arrangement:
    """Where this rank's parts of the leaves of one structure go.

    Attributes:
        layout: the first shard file.
        placed: the parts in it in file order, as the manifest lists them.
        front_count: how many parts are copied inside `save`; they are the first ones of the file.
        names: of all leaves, this rank's or not.
        share: what this rank stores.
        stills: the other files.
    """

    layout: ShardLayout
    placed: tuple[Placed, ...]
    front_count: int
    names: frozenset[str]
    share: Share
    stills: tuple[StillPart, ...] = ()

    @property
    def file_bytes(self) -> int:
        """Length of all files."""
        still = sum([part.layout.file_bytes for part in self.stills])
        return self.layout.file_bytes + still

    @property
    def all_placed(self) -> list[Placed]:
        """The parts in all files."""
        return [*self.placed, *(place for still in self.stills for place in still.placed)]

    @cached_property
    def front(self) -> Whole | None:
        """The parts that are copied inside `save`, but empty ones; None where some are slices."""
        front = self.placed[: self.front_count]
        return _whole([place for place in front if place.extent.nbytes])

    @cached_property
    def lazy(self) -> Whole | None:
        """The others; None where some are slices."""
        return _whole(self.placed[self.front_count :])

    @cached_property
    def lazy_names(self) -> tuple[str, ...]:
        """Of each of the others."""
        return tuple(map(_name, self.placed[self.front_count :]))


def _whole(placed: Sequence[Placed]) -> Whole | None:
    if any(part is not None for part in map(_slice, placed)):
        return None
    return Whole(list(map(_index, placed)), list(map(_offset, placed)), list(map(_nbytes, placed)))


def arrange(flat: FlatState, share: Share, stills: Sequence[Collection[str]] = ()) -> Arrangement:
    """The arrangement of a share; to be kept as long as the share stays the same object.

    Args:
        stills: names of the lazy leaves that lie in files of their own, file by file.

    Raises:
        ConfigError: the layout is impossible (its header would be too large).
    """
    apart = {name: number for number, names in enumerate(stills, 1) for name in names}
    specs, eager = [part.stored for part in share.parts], flat.eager
    is_eager = [eager[part.index] for part in share.parts]
    front = list(compress(specs, is_eager))
    files: list[list[LeafSpec]] = [[] for _ in range(len(stills) + 1)]
    for spec in compress(specs, map(not_, is_eager)):
        files[apart.get(spec.name, 0)].append(spec)
    by_name = dict(zip([spec.name for spec in specs], share.parts, strict=True))
    made = []
    for number, lazy in enumerate(files):
        layout = ShardLayout.plan([] if number else front, lazy)
        parts = [by_name[extent.name] for extent in layout.extents]
        placed = build_many(Placed, parts, repeat(number), layout.extents)
        made.append(StillPart(layout, tuple(placed)))
    names = frozenset([spec.name for spec in flat.specs])
    first, *rest = made
    return Arrangement(first.layout, first.placed, len(front), names, share, tuple(rest))


def items_of(leaves: Sequence[Leaf], placed: Sequence[Placed]) -> list[tuple[str, StageItem]]:
    """What is copied for these parts, in file order, each with the name of its leaf.

    A slice of a strided leaf is several items, since no one view has its bytes.
    """
    found: list[tuple[str, StageItem]] = []
    for place in placed:
        part, extent = place.part, place.extent
        tensor = leaves[part.index].tensor
        if part.slice is None or extent.nbytes == tensor.nbytes:
            found.append((extent.name, (tensor, extent.offset, extent.nbytes)))
            continue
        item = tensor.element_size()
        start, count = part.slice.begin // item, part.slice.nbytes // item
        for view, offset in blocks(tensor, start, count, max(count, 1)):
            found.append((extent.name, (view, extent.offset + offset * item, view.nbytes)))
    return found
