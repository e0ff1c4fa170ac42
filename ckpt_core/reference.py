"""What replicated leaves must have in common on all ranks, in a form that can name the leaf that differs.

Compared once for each structure: names, dtypes, shapes, and the first bytes of every leaf. State that is
not replicated after all (a ZeRO partition, BatchNorm statistics given as a plain state_dict) would
otherwise be cut into slices of different tensors, which no checksum finds.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from ckpt_core.state import blocks, memory_of

HEAD_BYTES = 1024
"""So much of each leaf is compared: cheap, and what is no replica differs from its first bytes on."""


class LeafRow(NamedTuple):
    """One leaf: what must be equal on all ranks. `digest` is "" where contents are not compared."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    digest: str


@dataclass(frozen=True, slots=True)
class StructureReference:
    """The `Reference` of coordination/ for the leaves that ranks store together."""

    rows: tuple[LeafRow, ...]

    def encode(self) -> bytes:
        """Compressed JSON."""
        return zlib.compress(json.dumps(self.rows).encode(), 1)

    def difference(self, other: bytes) -> str | None:
        """The first difference to rank 0's rows; see `Reference.difference`."""
        theirs = [_row(row) for row in json.loads(zlib.decompress(other))]
        for mine, first in zip(self.rows, theirs, strict=False):
            text = _difference(mine, first)
            if text is not None:
                return text
        if len(self.rows) != len(theirs):
            mine_longer = len(self.rows) > len(theirs)
            longer = self.rows if mine_longer else theirs
            extra = longer[min(len(self.rows), len(theirs))]
            side = "this rank has" if mine_longer else "rank 0 has"
            return f"{side} a leaf {extra.name!r} that the other one lacks"
        return None


def _row(row: list[Any]) -> LeafRow:
    name, dtype, shape, kind, digest = row
    return LeafRow(name, dtype, tuple(shape), kind, digest)


def _difference(mine: LeafRow, first: LeafRow) -> str | None:
    if mine.name != first.name:
        return f"where rank 0 has the leaf {first.name!r}, this rank has {mine.name!r}"
    for what, here, there in (
        ("dtype", mine.dtype, first.dtype),
        ("shape", mine.shape, first.shape),
        ("placement", mine.kind or "none", first.kind or "none"),
    ):
        if here != there:
            return f"{what} of the leaf {mine.name!r} is {here} here and {there} on rank 0"
    if mine.digest and first.digest and mine.digest != first.digest:
        return (
            f"the leaf {mine.name!r} is not equal on this rank and rank 0, so it is no replica: name "
            f"it in per_rank=, or, for buffers such as BatchNorm's, pass the module itself instead of "
            f"its state_dict()"
        )
    return None


def head_digest(tensor: torch.Tensor) -> str:
    """xxh3 of the first bytes of a leaf, as they are now.

    Called on the training thread while a structure has not been compared; synchronizes a CUDA device.
    """
    count = min(tensor.numel(), HEAD_BYTES // tensor.element_size())
    if count == 0:
        return ""
    digest = xxhash.xxh3_64()
    for view, _ in blocks(tensor, 0, count, count):
        head = view.detach().cpu().contiguous().view(-1)  # a name, so that its memory lives on
        digest.update(memory_of(head))
    return digest.hexdigest()
