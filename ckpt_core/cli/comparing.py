"""`diff`: what differs between two steps. Reads both leaf by leaf, in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ckpt_core.cli.leaf_bytes import LeafReader
from ckpt_core.cli.steps import opened
from ckpt_core.cli.text import count_text, say, say_json, say_rich, table
from ckpt_core.cli.tree import Item, read_tree, walk
from ckpt_core.cli.values import value_text
from ckpt_core.layout import LeafEntry, RankManifest, itemsize

_FLAGS = {"p": "parameter", "g": "requires grad", "c": "conjugated", "n": "negated"}
_PIECE_ELEMENTS = 32_000
"""Elements that are compared at once: they stay in the cache, and torch starts no threads for them,
which on 2 busy cores made it five times slower."""


@dataclass(frozen=True)
class TensorDiff:
    """A tensor that is in both and differs; `reason` is dtype, shape, view or values."""

    path: str
    reason: str
    a: dict[str, Any]
    b: dict[str, Any]
    elements: int = 0
    differing: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class ValueDiff:
    """Something else at a place of the tree: a value, a type, which tensors share memory."""

    path: str
    a: str
    b: str
    a_value: Any = None
    b_value: Any = None


@dataclass
class Differences:
    """All that was found; paths begin with `rank N:` when several ranks saved."""

    equal: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    tensors: list[TensorDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)

    @property
    def none(self) -> bool:
        """Whether both hold the same."""
        return not (self.only_a or self.only_b or self.tensors or self.values)


def compare(a: Path, b: Path, *, as_json: bool) -> bool:
    """Print what differs; False when anything does.

    Raises:
        NotCommitted: one of them is not there, or was retired meanwhile.
        CorruptCheckpoint, UnknownFormat, RestoreError: one cannot be read, so nothing is known.
    """
    found = Differences()
    with opened(a) as first, opened(b) as second, LeafReader(first) as x, LeafReader(second) as y:
        several = max(len(first.ranks), len(second.ranks)) > 1
        for left, right in zip_longest(first.ranks, second.ranks):
            _Ranks(left, right, (x, y), several=several).compare(found)
        names = str(first.path), str(second.path)
    if as_json:
        say_json({"a": names[0], "b": names[1], "same": found.none, **asdict(found)})
    else:
        _print(found)
    return found.none


class _Side:
    """One rank of one step, by the paths of its tree."""

    def __init__(self, rank: RankManifest | None, reader: LeafReader) -> None:
        self.reader = reader
        self.rank = 0 if rank is None else rank.rank
        self.items: dict[str, Item] = {}
        self._first: dict[str, str] = {}
        for item in walk(read_tree(rank.skeleton)) if rank is not None else ():
            path, number = item.path, 0
            while path in self.items:  # {"a.b": ..., "a": {"b": ...}}
                number += 1
                path = f"{item.path}~{number}"
            self.items[path] = item
            if item.tensor is not None:
                self._first.setdefault(item.tensor.leaf, path)

    def leaf(self, item: Item) -> LeafEntry | None:
        assert item.tensor is not None
        return self.reader.leaf(item.tensor.leaf, rank=self.rank)

    def pieces(self, leaf: LeafEntry, nbytes: int) -> Iterator[bytearray]:
        """Its bytes, `nbytes` at a time."""
        rest = bytearray()
        for block in self.reader.blocks(leaf.spec.name, rank=self.rank):
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


class _Ranks:
    """Compares what one rank wrote in both steps."""

    def __init__(
        self,
        left: RankManifest | None,
        right: RankManifest | None,
        readers: tuple[LeafReader, LeafReader],
        *,
        several: bool,
    ) -> None:
        self._a, self._b = _Side(left, readers[0]), _Side(right, readers[1])
        self._prefix = f"rank {max(self._a.rank, self._b.rank)}:" if several else ""
        self._done: dict[tuple[str, str], bool] = {}

    def compare(self, found: Differences) -> None:
        a, b = self._a.items, self._b.items
        found.only_a += [self._prefix + p for p, i in a.items() if p not in b and not i.children]
        found.only_b += [self._prefix + p for p, i in b.items() if p not in a and not i.children]
        for path in a:
            if path in b:
                self._compare_items(path, found)

    def _compare_items(self, path: str, found: Differences) -> None:
        a, b = self._a.items[path], self._b.items[path]
        texts = self._a.describe(a), self._b.describe(b)
        if texts[0] != texts[1] or _form(a) != _form(b):
            values = [item.value if item.is_value else None for item in (a, b)]
            found.values.append(ValueDiff(self._prefix + path, *texts, *values))
        if a.tensor is not None and b.tensor is not None:
            pair = a.tensor.leaf, b.tensor.leaf
            if pair not in self._done or not (a.tensor.is_whole and b.tensor.is_whole):
                self._done[pair] = True
                self._compare_tensors(path, found)

    def _compare_tensors(self, path: str, found: Differences) -> None:
        a, b = self._a.items[path], self._b.items[path]
        left, right = self._a.leaf(a), self._b.leaf(b)
        assert a.tensor is not None and b.tensor is not None
        known = [_known(item, leaf) for item, leaf in ((a, left), (b, right))]
        path = self._prefix + path
        for reason in ("dtype", "shape", "view"):
            if known[0].get(reason) != known[1].get(reason):
                found.tensors.append(TensorDiff(path, reason, known[0], known[1]))
                return
        if left is None or right is None:  # a skeleton that names leaves which are not there
            return
        made = self._values(path, left, right, known)
        if made is None:
            found.equal.append(path)
        else:
            found.tensors.append(made)

    def _values(
        self, path: str, left: LeafEntry, right: LeafEntry, known: list[dict[str, Any]]
    ) -> TensorDiff | None:
        size = itemsize(left.spec.dtype)
        distance: Any = None
        pieces = (
            self._a.pieces(left, size * _PIECE_ELEMENTS),
            self._b.pieces(right, size * _PIECE_ELEMENTS),
        )
        for one, other in zip(*pieces, strict=True):
            if one == other:
                continue
            if distance is None:
                from ckpt_core.cli.numbers import Distance

                distance = Distance(left.spec.dtype)
            distance.feed(one, other, itemsize=size)
        if distance is None:
            return None
        numbers = {**asdict(distance), "elements": left.nbytes // size}
        del numbers["dtype"]
        return TensorDiff(path, "values", known[0], known[1], **numbers)


def _form(item: Item) -> tuple[str, str, str]:
    """What makes two places that hold no tensor the same."""
    # As text: 1, 1.0 and True are equal for Python.
    value = json.dumps(item.value, sort_keys=True) if item.is_value else ""
    return item.kind, item.type_name, value


def _known(item: Item, leaf: LeafEntry | None) -> dict[str, Any]:
    if leaf is None:
        return {"dtype": None, "shape": None}
    made = {"dtype": leaf.spec.dtype, "shape": list(leaf.spec.shape)}
    if item.tensor is not None and not item.tensor.is_whole:
        made["view"] = [item.tensor.view, item.tensor.flags]
    return made


# -- for people --------------------------------------------------------------------------------


def _print(found: Differences) -> None:
    for side, paths in (("A", found.only_a), ("B", found.only_b)):
        for path in paths:
            say(f"only in {side}: {path}")
    for tensor in found.tensors:
        if tensor.reason != "values":
            say(f"{tensor.path}: {_shown(tensor, tensor.a)} -> {_shown(tensor, tensor.b)}")
    for value in found.values:
        say(f"{value.path or '(the state itself)'}: {value.a} -> {value.b}")
    rows = [_cells(tensor) for tensor in found.tensors if tensor.reason == "values"]
    if rows:
        columns = ("tensor", "differing", "of", "max abs", "max rel")
        say_rich(table(columns, rows, right=columns[1:]))
    say(_summary(found))


def _shown(tensor: TensorDiff, known: dict[str, Any]) -> str:
    if tensor.reason == "view":
        return "the whole leaf" if known.get("view") is None else f"view {known['view'][0]}"
    return f"{known['dtype']} {known['shape']}"


def _cells(tensor: TensorDiff) -> list[str]:
    largest = "" if tensor.max_abs is None else f"{tensor.max_abs:.3g}"
    relative = "" if tensor.max_rel is None else f"{tensor.max_rel:.3g}"
    if tensor.not_finite:
        largest = f"{largest} +{tensor.not_finite:,} inf/nan".strip()
    return [tensor.path, f"{tensor.differing:,}", f"{tensor.elements:,}", largest, relative]


def _summary(found: Differences) -> str:
    if found.none:
        return f"the same: {count_text(len(found.equal), 'tensor')} equal, and every value"
    differing = (
        f"{count_text(len(found.tensors), 'tensor')} and {count_text(len(found.values), 'value')}"
    )
    only = f"only in A: {len(found.only_a):,}, only in B: {len(found.only_b):,}"
    return f"differing: {differing}; equal: {count_text(len(found.equal), 'tensor')}; {only}"
