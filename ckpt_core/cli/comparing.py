"""`diff`: what differs between two steps. Reads both leaf by leaf, in pieces.

The steps may have been saved by different numbers of ranks: each rank that either has is compared with
what a restore would give it from the other one. What ranks store together is compared once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.sides import Side
from ckpt_core.cli.steps import opened
from ckpt_core.cli.text import note, say, say_json, say_rich, table
from ckpt_core.cli.tree import Item
from ckpt_core.layout import itemsize
from ckpt_core.observe import progress_bar
from ckpt_core.restore import LeafReader, StoredLeaf
from ckpt_core.units import count_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import DiffRequest

_PIECE_ELEMENTS = 32_000
"""Elements that are compared at once: they stay in the cache, and torch, where it compares them, starts no
threads for them, which on 2 busy cores made it five times slower."""


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
    """All that was found; paths begin with `rank N:` where it was found on some ranks only."""

    equal: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    tensors: list[TensorDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)

    @property
    def none(self) -> bool:
        """Whether both hold the same."""
        return not (self.only_a or self.only_b or self.tensors or self.values)


def compare(request: DiffRequest) -> bool:
    """Print what differs; False when anything does.

    Raises:
        NotCommitted: one of them is not there, or was retired meanwhile.
        CorruptCheckpoint, UnknownFormat, RestoreError: one cannot be read, or holds parts of leaves only
            (the root of one node), so nothing is known.
    """
    with (
        progress_bar(shown=not request.no_progress, tell=note) as show,
        opened(request.a) as x,
        opened(request.b) as y,
    ):
        names = str(x.leaves.step.path), str(y.leaves.step.path)
        found = _Comparison((x, y), partial(show, "compared")).run()
    if request.json:
        say_json({"a": names[0], "b": names[1], "same": found.none, **asdict(found)})
    else:
        _print(found)
    return found.none


@dataclass(frozen=True)
class _Note:
    """What one rank found at a place: `kind` is "only_a", "only_b" or "value"."""

    kind: str
    path: str
    value: ValueDiff | None = None

    @property
    def key(self) -> Hashable:
        """Equal for what ranks have found alike."""
        return self.kind, self.path, json.dumps(self.value and asdict(self.value), sort_keys=True)


_OfRank = tuple[str | None, str, _Note]
"""`has` and `prefix` of a rank, and what it found."""


class _Comparison:
    """Two steps, all their ranks."""

    def __init__(
        self, readers: tuple[LeafReader, LeafReader], show: Callable[[int, int], None]
    ) -> None:
        self.readers = readers
        self._show = show
        steps = [reader.leaves.step for reader in readers]
        self.ranks = sorted({rank.rank for step in steps for rank in step.ranks})
        self.found = Differences()
        self.done: set[Hashable] = set()
        self._done_bytes = self._all_bytes = 0

    def run(self) -> Differences:
        """Compare rank by rank, then unite what several of them found."""
        where: dict[Hashable, list[_OfRank]] = {}
        ranks = [_Rank(self, number) for number in self.ranks]
        self._all_bytes = sum({key: size for rank in ranks for key, size in rank.sizes()}.values())
        for rank in ranks:
            rank.compare()
            for one in rank.notes:
                where.setdefault(one.key, []).append((rank.has, rank.prefix, one))
        for notes in where.values():
            self._unite(notes)
        return self.found

    def told(self, nbytes: int) -> None:
        """So many more bytes of a side have been compared."""
        self._done_bytes += nbytes
        self._show(self._done_bytes, self._all_bytes)

    def _unite(self, notes: Sequence[_OfRank]) -> None:
        if len(notes) == len(self.ranks):
            *_, note = notes[0]
            self._add(note.kind, note, "")
            return
        for has, prefix, note in notes:
            # A rank that only one step has: whatever it has otherwise than the others is only there.
            only = None if has is None else f"only_{has}"
            if only is None or note.kind in (only, "value"):
                self._add(only or note.kind, note, prefix)

    def _add(self, kind: str, note: _Note, prefix: str) -> None:
        path = prefix + note.path
        if kind == "value":
            assert note.value is not None
            self.found.values.append(replace(note.value, path=path))
        else:
            (self.found.only_a if kind == "only_a" else self.found.only_b).append(path)


class _Rank:
    """Compares what both steps hold for one rank.

    Attributes:
        has: "a" or "b" when only that step was saved by such a rank, None when both were.
        notes: what was found that is no tensor in both.
    """

    def __init__(self, whole: _Comparison, rank: int) -> None:
        self._whole = whole
        self._a, self._b = Side(whole.readers[0], rank), Side(whole.readers[1], rank)
        self.has = None if self._a.is_own and self._b.is_own else "a" if self._a.is_own else "b"
        self.prefix = f"rank {rank}:" if len(whole.ranks) > 1 else ""
        self.notes: list[_Note] = []

    def sizes(self) -> Iterator[tuple[Hashable, int]]:
        """What is compared once, and its bytes."""
        for path in self._a.items.keys() & self._b.items.keys():
            if all(side.items[path].tensor is not None for side in (self._a, self._b)):
                key, left, _ = self._pair(path)
                shown = _known(self._a.items[path], left).get("view")
                yield key, 0 if left is None else len(_extent(shown, left))

    def compare(self) -> None:
        """Gather tensors in what was found so far, and everything else in `notes`."""
        a, b = self._a.items, self._b.items
        for kind, one, other in (("only_a", a, b), ("only_b", b, a)):
            lone = [path for path, item in one.items() if path not in other and not item.children]
            self.notes += [_Note(kind, path) for path in lone]
        for path in a:
            if path in b:
                self._compare_items(path)

    def _compare_items(self, path: str) -> None:
        a, b = self._a.items[path], self._b.items[path]
        texts = self._a.describe(a), self._b.describe(b)
        if texts[0] != texts[1] or _form(a) != _form(b):
            values = [item.value if item.is_value else None for item in (a, b)]
            self.notes.append(_Note("value", path, ValueDiff(path, *texts, *values)))
        if a.tensor is not None and b.tensor is not None:
            self._compare_tensors(path)

    def _pair(self, path: str) -> tuple[Hashable, StoredLeaf | None, StoredLeaf | None]:
        a, b = self._a.items[path], self._b.items[path]
        left, right = self._a.leaf(a), self._b.leaf(b)
        return (id(left), id(right), _shown_of(a), _shown_of(b)), left, right

    def _compare_tensors(self, path: str) -> None:
        a, b = self._a.items[path], self._b.items[path]
        key, left, right = self._pair(path)
        if key in self._whole.done:
            return
        self._whole.done.add(key)
        shared = self._a.is_shared(a) and self._b.is_shared(b)
        made = self._tensors(path if shared else self.prefix + path, (a, b), (left, right))
        if made is None:
            return
        if self.has is not None and not shared:
            self.notes.append(_Note(f"only_{self.has}", path))
        else:
            self._whole.found.tensors.append(made)

    def _tensors(
        self,
        path: str,
        items: tuple[Item, Item],
        leaves: tuple[StoredLeaf | None, StoredLeaf | None],
    ) -> TensorDiff | None:
        known = [_known(item, leaf) for item, leaf in zip(items, leaves, strict=True)]
        for reason in ("dtype", "shape", "view"):
            if known[0].get(reason) != known[1].get(reason):
                return TensorDiff(path, reason, known[0], known[1])
        left, right = leaves
        if left is None or right is None:  # skeletons that name leaves which are not there
            return None
        made = self._values(path, left, right, known)
        if made is None:
            self._whole.found.equal.append(path)
        return made

    def _values(
        self, path: str, left: StoredLeaf, right: StoredLeaf, known: list[dict[str, Any]]
    ) -> TensorDiff | None:
        shown = _extent(known[0].get("view"), left)
        # A step that is compared with itself is read: it may lie about what it holds.
        if self._a.path != self._b.path and self._a.places(left) == self._b.places(right):
            self._whole.told(len(shown))
            return None
        size = itemsize(left.spec.dtype)
        distance: Any = None
        pieces = (
            self._a.pieces(left, shown, size * _PIECE_ELEMENTS),
            self._b.pieces(right, shown, size * _PIECE_ELEMENTS),
        )
        for one, other in zip(*pieces, strict=True):
            self._whole.told(len(one))
            if one == other:
                continue
            if distance is None:
                from ckpt_core.cli.numbers import Distance

                distance = Distance(left.spec.dtype)
            distance.feed(one, other, itemsize=size)
        if distance is None:
            return None
        numbers = {**asdict(distance), "elements": len(shown) // size}
        del numbers["dtype"]
        return TensorDiff(path, "values", known[0], known[1], **numbers)


def _form(item: Item) -> tuple[str, str, str]:
    """What makes two places that hold no tensor the same."""
    # As text: 1, 1.0 and True are equal for Python.
    value = json.dumps(item.value, sort_keys=True) if item.is_value else ""
    return item.kind, item.type_name, value


def _shown_of(item: Item) -> Hashable:
    """Which leaf a tensor shows, and what of it: the same is compared once."""
    assert item.tensor is not None
    ref = item.tensor
    return ref.leaf, "" if ref.is_whole else json.dumps([ref.view, ref.flags])


def _known(item: Item, leaf: StoredLeaf | None) -> dict[str, Any]:
    if leaf is None:
        return {"dtype": None, "shape": None}
    made = {"dtype": leaf.spec.dtype, "shape": list(leaf.spec.shape)}
    if item.tensor is not None and not item.tensor.is_whole:
        made["view"] = [item.tensor.view, item.tensor.flags]
    return made


def _extent(view: Any, leaf: StoredLeaf) -> range:
    """The bytes of a leaf from the first element that a place shows to the last one.

    Args:
        view: what `_known` says of it; where that is nothing, or makes no sense, the whole leaf is shown.
    """
    whole, size = range(leaf.nbytes), itemsize(leaf.spec.dtype)
    try:
        dtype, offset, shape, strides = view[0]
        reach = sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
        end = offset + (reach + 1) * itemsize(dtype) if all(shape) else offset
        # Of another dtype, it may begin or end inside an element.
        return whole[max(offset // size * size, 0) : max(-(-end // size) * size, 0)]
    except (TypeError, ValueError, LookupError, AttributeError):
        return whole


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
