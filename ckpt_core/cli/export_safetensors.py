"""One safetensors file: bytes go from the shard files to it in blocks, torch is not needed.

Every place of the tree where a tensor occurs becomes an entry of its own, with its own bytes: a file in
which two entries shared them would be refused by safetensors. Only a view of a leaf is put together in
memory, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ckpt_core.cli.exported import Exported, check_room, unique
from ckpt_core.cli.parts import Part
from ckpt_core.cli.tree import Item, TensorRef, read_tree, walk
from ckpt_core.cli.values import value_text
from ckpt_core.errors import ConfigError, CorruptCheckpoint
from ckpt_core.layout import (
    METADATA_KEY,
    RankManifest,
    nbytes,
    parse_header,
    plain_header,
    storage,
)
from ckpt_core.restore import RankLeaves, StoredLeaf
from ckpt_core.types import LeafSpec


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the exported file."""

    spec: LeafSpec
    nbytes: int
    tensor: TensorRef


def write_safetensors(file: IO[bytes], part: Part, leaves: RankLeaves, made: Exported) -> None:
    """Write the chosen tensors into an empty file.

    Raises:
        ConfigError: nothing is chosen, a name cannot be one, or the disk is too small.
        CorruptCheckpoint: the step's bytes or manifest are not what was written.
        RestoreError: this is the root of a node, and a part of a chosen tensor lies in another one.
    """
    chosen = [item for item in walk(read_tree(leaves.manifest.skeleton)) if part.keeps(item.path)]
    leaves.require({item.tensor.leaf for item in chosen if item.tensor is not None})
    entries = sorted(
        _entries(chosen, part, leaves, made), key=lambda entry: -storage(entry.spec.dtype).itemsize
    )
    if not entries:
        raise ConfigError(f"{part.shown}: no tensor has such a name; `ckpt-core show` lists them")
    header = plain_header(entry.spec for entry in entries)
    total = len(header) + sum(entry.nbytes for entry in entries)
    check_room(file, total)
    file.write(header)
    for entry in entries:
        for block in made.told(_bytes(entry.tensor, leaves), of_bytes=total):
            file.write(block)
    # What safetensors would refuse must not be left behind.
    parse_header(header, file_bytes=file.tell(), path=Path(file.name))
    made.tensors = len(entries)


def _entries(
    chosen: Iterable[Item], part: Part, leaves: RankLeaves, made: Exported
) -> Iterator[_Entry]:
    used = {METADATA_KEY}
    for item in chosen:
        if item.tensor is None:
            if item.is_value and item.kind != "meta":
                made.left_out[item.path] = value_text(item.value)
            elif item.kind == "composite":
                made.changed[item.path] = f"{item.type_name} tensor, as its parts"
            continue
        leaf = leaves.leaf(item.tensor.leaf)
        if leaf is None:
            raise CorruptCheckpoint(
                f"{item.path}: the leaf {item.tensor.leaf!r} is not in the manifest",
                path=file_of(leaves.manifest),
            )
        spec = _spec(item, leaf, _unique(part.name(item.path), used))
        if storage(spec.dtype).trailing is not None:
            made.changed[item.path] = f"{spec.dtype} as {storage(spec.dtype).code} parts"
        yield _Entry(spec, nbytes(spec), item.tensor)


def file_of(rank: RankManifest) -> str:
    """Name of a rank's first file, for errors."""
    return rank.files[0].name if rank.files else "the step"


def _spec(item: Item, leaf: StoredLeaf, name: str) -> LeafSpec:
    assert item.tensor is not None
    if item.tensor.view is None:
        return LeafSpec(name, leaf.spec.dtype, leaf.spec.shape)
    from ckpt_core.cli.tensors import View

    view = View.of(item.tensor, leaf)
    return LeafSpec(name, view.dtype, view.shape)


def _unique(name: str, used: set[str]) -> str:
    """A name that safetensors and UTF-8 can hold, and that no other tensor has."""
    made = unique(name.encode("utf-8", "backslashreplace").decode() or "tensor", used)
    used.add(made)
    return made


def _bytes(tensor: TensorRef, leaves: RankLeaves) -> Iterator[memoryview]:
    if tensor.is_whole:
        yield from leaves.blocks(tensor.leaf)
        return
    from ckpt_core.cli.tensors import View, view_bytes

    leaf = leaves.leaf(tensor.leaf)
    assert leaf is not None
    yield view_bytes(View.of(tensor, leaf), leaves)
