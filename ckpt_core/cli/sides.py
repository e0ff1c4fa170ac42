"""`diff`: one rank of one of the two steps, by the paths of its tree."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path

from ckpt_core.cli.same_files import identity
from ckpt_core.cli.tree import Item, read_tree
from ckpt_core.cli.values import value_text
from ckpt_core.restore import LeafReader, StoredLeaf

_FLAGS = {"p": "parameter", "g": "requires grad", "c": "conjugated", "n": "negated"}


def _with_keys(item: Item, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Item]]:
    """All places, with the keys on the way to them."""
    yield keys, item
    for child in item.children:
        yield from _with_keys(child, (*keys, child.key))


class Side:
    """What a step holds for one rank.

    Attributes:
        items: the places of its tree, by path.
        is_own: whether this rank saved it; else it is what a restore would give the rank for want of its
            own: the state of another one.
    """

    def __init__(self, reader: LeafReader, rank: int) -> None:
        owner = reader.leaves.owner(rank)
        self.is_own = owner.rank == rank
        self._reader = reader
        self._leaves = reader.of_rank(owner)
        self.items: dict[str, Item] = {}
        self._first: dict[str, str] = {}
        rows = list(_with_keys(read_tree(owner.skeleton)))
        alike: dict[str, list[tuple[str, ...]]] = {}
        for keys, item in sorted(rows, key=lambda row: row[0]):
            alike.setdefault(item.path, []).append(keys)
        for keys, item in rows:
            # {"a.b": ..., "a": {"b": ...}}: numbered by their keys, whichever comes first.
            number = alike[item.path].index(keys)
            path = f"{item.path}~{number}" if number else item.path
            while path in self.items:
                number += 1
                path = f"{item.path}~{number}"
            self.items[path] = item
            if item.tensor is not None:
                self._first.setdefault(item.tensor.leaf, path)

    def leaf(self, item: Item) -> StoredLeaf | None:
        """The leaf of a tensor; None when the skeleton names one that is not there.

        Raises:
            RestoreError: this is the root of a node, and the leaf lies in another one.
        """
        assert item.tensor is not None
        found = self._leaves.leaf(item.tensor.leaf)
        if found is None and self._reader.leaves.is_partial:
            raise self._reader.leaves.elsewhere([item.tensor.leaf])
        return found

    @property
    def path(self) -> Path:
        """Of the step."""
        return self._reader.leaves.step.path

    def places(self, leaf: StoredLeaf) -> list[Hashable]:
        """Which bytes of which files a leaf is; the same for steps that share them."""
        step = self._reader.leaves.step
        names = {rank.rank: rank.files for rank in step.ranks}
        paths = [self.path / names[place.rank][place.file].name for place in leaf.places]
        return [
            (identity(path) or path, place.offset, place.part)
            for path, place in zip(paths, leaf.places, strict=True)
        ]

    def is_shared(self, item: Item) -> bool:
        """Whether a place shows what ranks store together: it is then the same for all of them."""
        return item.tensor is not None and self._leaves.is_shared(item.tensor.leaf)

    def pieces(self, leaf: StoredLeaf, shown: range, nbytes: int) -> Iterator[bytearray]:
        """The bytes of it that are shown, `nbytes` at a time."""
        rest = bytearray()
        for block in self._reader.blocks(leaf, shown):
            start = min(nbytes - len(rest), len(block)) if rest else 0
            rest += block[:start]
            if len(rest) == nbytes:
                yield rest
                rest = bytearray()
            while len(block) - start >= nbytes:
                yield bytearray(block[start : start + nbytes])
                start += nbytes
            rest += block[start:]
        if rest:
            yield rest

    def describe(self, item: Item) -> str:
        """A place in words, without the bytes of its tensors."""
        if item.is_value:
            return value_text(item.value)
        if item.tensor is None:
            return f"{item.kind} {item.type_name}".strip()
        flags = "".join(f", {_FLAGS.get(flag, flag)}" for flag in item.tensor.flags)
        text = f"{item.kind}{flags}"
        first = self._first[item.tensor.leaf]
        return text if self.items[first] is item else f"{text}, same memory as {first}"
