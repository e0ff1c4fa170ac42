"""What is copied of a state: leaves, and where in the file their bytes go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

from torch import Tensor

StageItem = tuple[Tensor, int, int]
"""A live leaf, its offset in the shard file, and its bytes."""


class Items(Sequence[StageItem]):
    """Leaves in file order, column by column: of very many, a tuple for each takes longer than all else.

    Attributes:
        tensors, offsets, sizes: one of each for each leaf; not to be changed.
    """

    __slots__ = ("offsets", "sizes", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.tensors = tensors
        self.offsets = offsets
        self.sizes = sizes

    @classmethod
    def of(cls, items: Sequence[StageItem]) -> Items:
        """The same leaves, as columns."""
        if isinstance(items, Items):
            return items
        tensors, offsets, sizes = zip(*items, strict=True) if items else ((), (), ())
        return cls(tensors, offsets, sizes)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[StageItem]:
        return zip(self.tensors, self.offsets, self.sizes, strict=True)

    @overload
    def __getitem__(self, index: int) -> StageItem: ...

    @overload
    def __getitem__(self, index: slice) -> Items: ...

    def __getitem__(self, index: int | slice) -> StageItem | Items:
        if isinstance(index, slice):
            return Items(self.tensors[index], self.offsets[index], self.sizes[index])
        return self.tensors[index], self.offsets[index], self.sizes[index]


def batches(
    items: Sequence[StageItem], most_bytes: int, most: int
) -> Iterator[Sequence[StageItem]]:
    """Leaves in file order, each with so many bytes or leaves, but the last one."""
    columns = Items.of(items)
    ends = list(accumulate(columns.sizes))
    start, before = 0, 0
    while start < len(ends):
        stop = min(bisect_left(ends, before + most_bytes, lo=start) + 1, start + most, len(ends))
        yield columns[start:stop]
        start, before = stop, ends[stop - 1]
