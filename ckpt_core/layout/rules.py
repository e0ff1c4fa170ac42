"""The rules that a manifest's values keep, checked before it is written and after it was read.

The objects may hold anything that JSON can spell where their types promise an int or a text: every
check looks at the type first. Each raises `Invalid`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_core.layout.dtypes import MAX_BYTES, MAX_DIMS, STORAGE, measure
from ckpt_core.layout.names import (
    FORMAT_VERSION,
    MAX_FILES,
    MAX_NAMED_FILES,
    MAX_RANKS,
    is_file_name,
    parents_of,
    parse_shard_name,
)
from ckpt_core.layout.strict_json import Invalid, bounded, brief, is_name, note

if TYPE_CHECKING:
    from ckpt_core.layout.entries import FileEntry, LeafEntry, SliceEntry
    from ckpt_core.types import Block, LeafSpec

    _Place = tuple[int, int, int, str]

MAX_MANIFEST_BYTES = 2**28
"""Bound of one JSON file: a reader holds it whole, and several times as much while it parses."""

MAX_LEVELS = 512
"""Deepest nesting of a skeleton: readers recurse, and not every reader starts on an empty stack."""

MAX_STEP = 10**18 - 1
MAX_UNIX_S = 253_402_300_799
"""The end of the year 9999: later moments have no calendar date."""

_XXH3 = re.compile(r"[0-9a-f]{16}\Z")


def check_version(version: object) -> None:
    """A version that this release writes."""
    bounded(version, "version", 1, FORMAT_VERSION)


def check_rank(rank: object) -> None:
    """A rank is an int of at most five digits."""
    bounded(rank, "rank", 0, MAX_RANKS - 1)


def check_files(files: Sequence[FileEntry], *, rank: int) -> None:
    """Names are those of this rank's shards, each once; chunks add up to the file."""
    _check_each(files, MAX_FILES)
    for file in files:
        parsed = parse_shard_name(file.name)
        if parsed is None or parsed[0] != rank:
            raise Invalid("file name", expected=f"shard-{rank:05d}-N.safetensors", got=file.name)


def check_named_files(files: Sequence[FileEntry]) -> None:
    """Names are plain relative paths, each once, none in the place of a directory; chunks add up."""
    _check_each(files, MAX_NAMED_FILES)
    for file in files:
        if not is_file_name(file.name):
            raise Invalid("file name", expected="a relative path of plain names", got=file.name)
    names = {file.name for file in files}
    for name in names:
        # One by one: all parents of all names together may be a hundred times as much text.
        for parent in parents_of([name]) & names:
            raise Invalid("file name", expected="no directory of other files", got=parent)


def check_no_leaves(leaves: Sequence[LeafEntry], slices: Sequence[SliceEntry]) -> None:
    """A directory of files has none."""
    if leaves or slices:
        raise Invalid("leaves and slices", expected="none", got=len(leaves) + len(slices))


def _check_each(files: Sequence[FileEntry], most: int) -> None:
    if len(files) > most:
        raise Invalid("files", expected=f"at most {most}", got=len(files))
    seen: set[str] = set()
    for file in files:
        if type(file.name) is not str or file.name in seen:
            raise Invalid("file name", expected="a text, each once", got=file.name)
        seen.add(file.name)
        _check_chunks(file)


def _check_chunks(file: FileEntry) -> None:
    bounded(file.nbytes, f"nbytes of {file.name}", 0, MAX_BYTES)
    total = 0
    for chunk in file.chunks:
        total += bounded(chunk.nbytes, f"chunk of {file.name}", 1, file.nbytes)
        if chunk.xxh3 is not None:
            check_xxh3(chunk.xxh3, f"xxh3 of a chunk of {file.name}")
    if total != file.nbytes:
        raise Invalid(f"chunks of {file.name}", expected=f"{file.nbytes} bytes in all", got=total)


def check_entries(
    leaves: Sequence[LeafEntry], slices: Sequence[SliceEntry], files: Sequence[int]
) -> None:
    """Leaves and slices lie inside files of these lengths, fit their shapes, and share no byte or name."""
    places = [_check_leaf(leaf, files) for leaf in leaves]
    places += [_check_slice(entry, files) for entry in slices]
    names = {name for *_, name in places}
    if len(names) != len(places):
        raise Invalid("leaf names", expected=f"{len(places)} different ones", got=len(names))
    # Overlap would let a small file claim any amount of memory for its leaves.
    end, last = 0, -1
    for file, offset, size, name in sorted(places):
        if file != last:
            end, last = 0, file
        if offset < end:
            raise Invalid(f"offset of leaf {brief(name)}", expected=f">= {end}", got=offset)
        end = offset + size


def _check_leaf(leaf: LeafEntry, files: Sequence[int]) -> _Place:
    size = _check_spec(leaf.spec)
    if type(leaf.nbytes) is not int or leaf.nbytes != size:
        what = f"nbytes of leaf {brief(leaf.spec.name)}"
        raise Invalid(what, expected=str(size), got=leaf.nbytes)
    return _check_place(leaf.spec.name, (leaf.file, leaf.offset, size), files)


def _check_slice(entry: SliceEntry, files: Sequence[int]) -> _Place:
    spec, part = entry.spec, entry.slice
    room = _check_spec(spec)
    whose, unit = f"of the slice of leaf {brief(spec.name)}", STORAGE[spec.dtype].itemsize
    if part.block is not None:
        room = check_block(part.block, spec.shape, whose) * unit
    begin = bounded(part.begin, f"begin {whose}", 0, room)
    size = bounded(part.nbytes, f"nbytes {whose}", 0, room - begin)
    place = _check_place(spec.name, (entry.file, entry.offset, size), files)
    for what, value in (("begin", begin), ("nbytes", size), ("offset", size and entry.offset)):
        if value % unit:
            raise Invalid(f"{what} {whose}", expected=f"a multiple of {unit}", got=value)
    return place


def check_block(block: Block, shape: tuple[int, ...], whose: str) -> int:
    """How many elements the block has; raises `Invalid` unless it lies inside the shape."""
    if not len(block.offsets) == len(block.sizes) == len(shape):
        got = note(f"{len(block.offsets)} offsets and {len(block.sizes)} sizes")
        raise Invalid(f"block {whose}", expected=f"{len(shape)} of each", got=got)
    for offset, size, dim in zip(block.offsets, block.sizes, shape, strict=True):
        bounded(offset, f"block offset {whose}", 0, dim)
        bounded(size, f"block size {whose}", 0, dim - offset)
    return math.prod(block.sizes)


def _check_spec(spec: LeafSpec) -> int:
    """Bytes of the whole leaf."""
    if not is_name(spec.name):
        raise Invalid("leaf name", expected="a text that UTF-8 can hold", got=spec.name)
    if type(spec.dtype) is not str or spec.dtype not in STORAGE:
        what = f"dtype of leaf {brief(spec.name)}"
        raise Invalid(what, expected="a dtype of this version", got=spec.dtype)
    for dim in spec.shape:
        if type(dim) is not int:
            raise Invalid(f"shape of leaf {brief(spec.name)}", expected="ints", got=dim)
    size = measure(spec.dtype, spec.shape)
    if size is None:
        expected = f"up to {MAX_DIMS} dimensions >= 0, 2**60 bytes"
        got = note(f"{len(spec.shape)} dimensions")
        raise Invalid(f"shape of leaf {brief(spec.name)}", expected=expected, got=got)
    return size


def _check_place(name: str, place: tuple[int, int, int], files: Sequence[int]) -> _Place:
    """`(file, offset, nbytes)`, of which the last is checked before, lies in one of the files."""
    file, offset, size = place
    if not files:
        raise Invalid("file of a leaf", expected="a file", got=note("a rank without files"))
    # Their texts are made for those alone that are wrong.
    if type(file) is not int or not 0 <= file < len(files):
        bounded(file, f"file of leaf {brief(name)}", 0, len(files) - 1)
    if type(offset) is not int or not 0 <= offset <= files[file] - size:
        bounded(offset, f"offset of leaf {brief(name)}", 0, files[file] - size)
    return (file, offset, size, name)


def check_xxh3(value: object, what: str) -> None:
    """A checksum as text."""
    if type(value) is not str or _XXH3.match(value) is None:
        raise Invalid(what, expected="16 lower-case hex digits", got=value)
