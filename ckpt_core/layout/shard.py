"""Where each leaf's bytes lie in a shard file, planned before a byte is copied.

Order of the file: header, eager leaves, lazy leaves, tail. Each gap is a padding entry of its own,
since safetensors forbids holes. The tensor region starts at a multiple of 4096, so an offset in the
region has the alignment of the offset in the file.

Source: LightCheck III-D (data map and one contiguous tensor region), DeepFreeze IV-A d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from ckpt_core.errors import ConfigError
from ckpt_core.layout.dtypes import nbytes, storage
from ckpt_core.layout.header import (
    METADATA_KEY,
    PAD_PREFIX,
    encode_header,
    entry_bytes,
    entry_middle,
    metadata_text,
    pad_entry,
    quote,
    region_bytes,
    utf8,
)
from ckpt_core.types import LeafSpec, build_many
from ckpt_core.units import ALIGN_BYTES, align_up, count_text

LARGE_LEAF_BYTES = 4096
"""Lazy leaves from this size on start on a pair of cache lines; smaller ones on their itemsize."""

LARGE_LEAF_ALIGN = 128

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one leaf: `offset` counts from the start of the file."""

    name: str
    offset: int
    nbytes: int


class _Kind(NamedTuple):
    """What all leaves of one dtype and shape share; computed once for each."""

    nbytes: int
    align: int
    middle: str


@dataclass(frozen=True)
class ShardLayout:
    """The data map of one shard file.

    Attributes:
        header: the first bytes of the file, a multiple of 4096 of them.
        extents: every leaf in file order; padding is not among them.
        front_bytes: offset where the eager leaves end; `len(header)` when there are none.
        file_bytes: length of the file, a multiple of 4096.
    """

    header: bytes
    extents: tuple[Extent, ...]
    front_bytes: int
    file_bytes: int

    @classmethod
    def plan(
        cls,
        eager: Sequence[LeafSpec],
        lazy: Sequence[LeafSpec],
        *,
        metadata: Mapping[str, str] = _NO_METADATA,
    ) -> ShardLayout:
        """The layout when all leaves are known at once.

        Called on the training thread inside `save` when the structure is new; its cost is a stall.

        Args:
            eager: leaves copied inside `save`; they are put first, widest dtype first.
            lazy: leaves copied by the stager, kept in this order.
            metadata: more text for the header's `__metadata__`.

        Raises:
            ConfigError: duplicate or reserved name, unknown dtype, or leaves too many for a header.
        """
        region = _Region([*eager, *lazy])
        # Order matters: descending powers of two need no gaps between them, whatever the shapes.
        width = {dtype: storage(dtype).itemsize for dtype in {spec.dtype for spec in eager}}
        front = sorted(eager, key=lambda spec: width[spec.dtype], reverse=True)
        front_starts, front_sizes = region.place(front, aligned=False)
        front_end = region.end
        lazy_starts, lazy_sizes = region.place(lazy, aligned=True)
        region.pad_to(ALIGN_BYTES)
        header = encode_header(metadata_text(metadata), region.entries)
        base = len(header)
        names = [spec.name for spec in chain(front, lazy)]
        starts = map(base.__add__, chain(front_starts, lazy_starts))
        extents = tuple(build_many(Extent, names, starts, chain(front_sizes, lazy_sizes)))
        return cls(header, extents, base + front_end, base + region.end)


class BuilderMark(NamedTuple):
    """A moment of a `LayoutBuilder`: how many leaves were placed, and where the region stood."""

    leaves: int
    region: tuple[int, int, int]


class LayoutBuilder:
    """The layout when the order becomes known one leaf at a time (layer-wise saves).

    Call order: construct with all leaves that will come, `append` each once in the order in which
    they become ready, `finish`. Extents are final as soon as `append` returns: header and file have
    the size of the worst order. One thread at a time.

    Attributes:
        header_bytes: length of the header, a multiple of 4096; the first leaf starts there.
        file_bytes: length of the file, a multiple of 4096.
    """

    def __init__(
        self, specs: Sequence[LeafSpec], *, metadata: Mapping[str, str] = _NO_METADATA
    ) -> None:
        """Fix the sizes of header and file.

        Raises:
            ConfigError: as for `ShardLayout.plan`.
        """
        self._region = _Region(specs)
        self._specs = {spec.name: spec for spec in specs}
        self._extents: dict[str, Extent] = {}
        self._metadata = metadata_text(metadata)
        end, entry_bytes = self._region.worst(specs)
        self.header_bytes = region_bytes(len(utf8(self._metadata)) + entry_bytes)
        self.file_bytes = self.header_bytes + end

    def append(self, name: str) -> Extent:
        """Place the next leaf.

        Raises:
            ConfigError: the name was not announced, or was appended before.
        """
        spec = self._specs.get(name)
        if spec is None or name in self._extents:
            raise ConfigError(f"leaf {name!r} was appended before or is not part of this layout")
        (start,), (size,) = self._region.place([spec], aligned=True)
        extent = Extent(name, self.header_bytes + start, size)
        self._extents[name] = extent
        return extent

    def mark(self) -> BuilderMark:
        """Where it is now, for `go_back`."""
        return BuilderMark(len(self._extents), self._region.mark())

    def go_back(self, mark: BuilderMark) -> None:
        """Forget every leaf that was placed after `mark`, also one that is placed half. Idempotent."""
        while len(self._extents) > mark.leaves:
            self._extents.popitem()
        self._region.go_back(mark.region)

    def finish(self) -> ShardLayout:
        """The whole layout; no leaf comes after it.

        Raises:
            ConfigError: announced leaves are missing.
        """
        left = [name for name in self._specs if name not in self._extents]
        if left:
            raise ConfigError(
                f"never appended: {count_text(len(left), 'leaf')}, {left[0]!r} among them"
            )
        self._region.pad_until(self.file_bytes - self.header_bytes)
        header = encode_header(self._metadata, self._region.entries, room_bytes=self.header_bytes)
        return ShardLayout(
            header, tuple(self._extents.values()), self.header_bytes, self.file_bytes
        )


class _Region:
    """The tensor region while it grows: the offset where it ends, and the text of its entries."""

    def __init__(self, specs: Sequence[LeafSpec]) -> None:
        self.end = 0
        self.entries: list[str] = []
        self._names = {spec.name for spec in specs}
        self._kinds: dict[tuple[str, tuple[int, ...]], _Kind] = {}
        self._pads = 0
        if len(self._names) != len(specs):
            twice = Counter(spec.name for spec in specs).most_common(1)[0][0]
            raise ConfigError(f"leaf name {twice!r} occurs more than once: names are unique")
        if METADATA_KEY in self._names:
            raise ConfigError(f"leaf name {METADATA_KEY!r} is safetensors' own: choose another")

    def mark(self) -> tuple[int, int, int]:
        """Where it is now, for `go_back`."""
        return len(self.entries), self.end, self._pads

    def go_back(self, mark: tuple[int, int, int]) -> None:
        """Be as it was then."""
        count, self.end, self._pads = mark
        del self.entries[count:]

    def place(self, specs: Sequence[LeafSpec], *, aligned: bool) -> tuple[list[int], list[int]]:
        """Put leaves next; the offset in the region of each, and its bytes."""
        # One loop over locals, since ten thousand leaves are planned while training waits.
        kinds, append, end = self._kinds, self.entries.append, self.end
        starts: list[int] = []
        sizes: list[int] = []
        for spec in specs:
            size, align, middle = kinds.get((spec.dtype, spec.shape)) or self._kind(spec)
            if aligned and end % align:
                self.end = end
                self.pad_to(align)
                end = self.end
            start, end = end, end + size
            append(f"{quote(spec.name)}{middle}{start},{end}]}}")
            starts.append(start)
            sizes.append(size)
        self.end = end
        return starts, sizes

    def pad_to(self, unit: int) -> None:
        """Fill up to a multiple of `unit` with a padding entry, if there is anything to fill."""
        self.pad_until(align_up(self.end, unit))

    def pad_until(self, end: int) -> None:
        """Fill up to `end` with one padding entry, if there is anything to fill."""
        gap = end - self.end
        assert gap >= 0, "leaves end beyond the worst case"
        if gap == 0:
            return
        name = f"{PAD_PREFIX}{self._pads}"
        while name in self._names:  # a leaf may have a padding entry's name
            self._pads += 1
            name = f"{PAD_PREFIX}{self._pads}"
        self._pads += 1
        self.entries.append(pad_entry(name, self.end, self.end + gap))
        self.end += gap

    def worst(self, specs: Sequence[LeafSpec]) -> tuple[int, int]:
        """Where the region ends at the latest, a multiple of 4096, and the most bytes that its
        entries take in the header: whatever the order of all leaves."""
        kinds = [self._kinds.get((spec.dtype, spec.shape)) or self._kind(spec) for spec in specs]
        # If every size is a multiple of some power of two, so is every offset: no gap below it.
        unit = min([kind.nbytes & -kind.nbytes for kind in kinds if kind.nbytes], default=1)
        gaps = [kind.align - unit for kind in kinds if kind.align > unit]
        end = align_up(sum([kind.nbytes for kind in kinds]) + sum(gaps), ALIGN_BYTES)
        # Names of padding skip those of leaves, so their numbers may go beyond the count of gaps.
        pad_name = f"{PAD_PREFIX}{len(gaps) + 1 + len(specs)}"
        pad_bytes = 1 + len(pad_entry(pad_name, end, 2 * end))
        names = len(utf8("".join([quote(spec.name) for spec in specs])))
        leaves = sum([entry_bytes(0, kind.middle, end) for kind in kinds])
        return end, names + leaves + (len(gaps) + 1) * pad_bytes

    def _kind(self, spec: LeafSpec) -> _Kind:
        size = nbytes(spec)
        align = LARGE_LEAF_ALIGN if size >= LARGE_LEAF_BYTES else storage(spec.dtype).itemsize
        kind = _Kind(size, align if size else 1, entry_middle(spec))
        self._kinds[spec.dtype, spec.shape] = kind
        return kind
