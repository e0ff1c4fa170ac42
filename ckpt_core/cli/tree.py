"""The skeleton of a checkpoint as a tree to look at. Reads its JSON as it is: no torch, no pickle.

Every place of the state becomes an `Item`. What does not have the form that the skeleton's encoding
gives it (docs/format.md) is shown as "unknown", and is no error: a person wants to see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckpt_core.state import KINDS, Kind, Map, Seq

Json = Any

_SCALARS = ("int", "float", "str", "complex")
_ROOT_NAME = "tensor"
_MAX_DEPTH = 130
"""A little more than a save accepts. What nests deeper was not written by us; Python's stack ends."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One occurrence of a tensor: the leaf that holds its bytes, and what it shows of it.

    Attributes:
        leaf: name of the leaf.
        view: [dtype, byte offset, shape, strides] when it is not the leaf itself.
        flags: p Parameter, g requires grad, c and n lazy conjugate and negation.
    """

    leaf: str
    view: Json = None
    flags: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its bytes are the leaf's bytes."""
        return self.view is None and not set(self.flags) & {"c", "n"}


@dataclass(frozen=True, slots=True)
class Item:
    """A place of the state tree.

    Attributes:
        key: last part of its path.
        path: dotted path from the top; "" is the top.
        kind: "tensor", a container such as "dict", or the kind of a value.
        type_name: of an object, dataclass, enum; what a composite tensor is.
        value: JSON of a plain value as the skeleton has it; None for containers.
        tensor: of a tensor or a numpy array.
        children: of a container.
    """

    key: str
    path: str
    kind: str
    type_name: str = ""
    value: Json = None
    tensor: TensorRef | None = None
    children: tuple[Item, ...] = ()

    @property
    def is_value(self) -> bool:
        """Whether it is a plain value, shown on one line."""
        return self.tensor is None and not self.children


@dataclass(frozen=True, slots=True)
class _At:
    """Where in the tree a node lies."""

    key: str = ""
    path: str = ""
    depth: int = 0

    def below(self, key: str, *, within: str | None = None) -> _At:
        outer = self.path if within is None else within
        return _At(key, f"{outer}.{key}" if outer else key, self.depth + 1)

    def item(self, kind: str, **rest: Any) -> Item:
        return Item(self.key, self.path, kind, **rest)


def read_tree(skeleton: Json) -> Item:
    """The tree of a rank manifest's skeleton, whoever wrote it."""
    return _item(skeleton.get("tree") if isinstance(skeleton, dict) else None, _At())


def kind_of(node: Json) -> Kind | None:
    """What kind of container a node is; None when it is none, or lacks the items of one."""
    if isinstance(node, list):
        return KINDS["list"]
    tag = node.get("!") if isinstance(node, dict) else None
    kind = KINDS.get(tag) if isinstance(tag, str) else None
    is_empty = kind is not None and kind.form is Seq and not isinstance(node.get("v"), list)
    return None if is_empty else kind


def children_of(node: Json) -> list[tuple[Json, Json]]:
    """Key and value nodes of what is in a container; what is no such pair is left out."""
    kind = kind_of(node)
    if kind is None:
        return []
    held = node if isinstance(node, list) else node.get("v")
    if kind.form is Seq:
        return list(enumerate(held))
    if kind.form is Map and isinstance(held, dict):
        return list(held.items())
    rows = node.get("items" if kind.form is Map else "fields")
    rows = rows if isinstance(rows, list) else []
    return [(row[0], row[1]) for row in rows if isinstance(row, list) and len(row) == 2]


def walk(item: Item) -> Iterator[Item]:
    """All places, containers before what is in them."""
    yield item
    for child in item.children:
        yield from walk(child)


def _item(node: Json, at: _At) -> Item:
    if at.depth > _MAX_DEPTH:
        return at.item("unknown", value=node)
    if node is None or isinstance(node, bool | int | float | str):
        return at.item("None" if node is None else type(node).__name__, value=node)
    kind = kind_of(node)
    if kind is not None:
        return _container(node, kind, at)
    tag = node.get("!") if isinstance(node, dict) else None
    if not isinstance(tag, str):
        return at.item("unknown", value=node)
    if tag == "object" and "state" in node:
        state = _item(node["state"], replace(at, depth=at.depth + 1))
        return replace(state, type_name=_text(node.get("type")))
    if tag in ("tensor", "array", "composite"):
        return _tensor(node, tag, at)
    return at.item(tag, type_name=_text(node.get("type")), value=node)


def _container(node: Json, kind: Kind, at: _At) -> Item:
    rows = [(key_text(key), value) for key, value in children_of(node)]
    if kind.form is Seq and all(is_scalar(value) for _, value in rows):
        return at.item(kind.tag, value=node)
    if kind.form is Map and isinstance(node.get("attrs"), dict):
        rows.append(("__dict__", node["attrs"]))
    children = tuple([_item(value, at.below(key)) for key, value in rows])
    if not children:
        return at.item(kind.tag, value=node)
    name = _text(node.get("type")) if isinstance(node, dict) else ""
    return at.item(kind.tag, type_name=name, children=children)


def _tensor(node: Json, tag: str, at: _At) -> Item:
    if tag == "composite" and isinstance(node.get("parts"), dict):
        return _composite(node, at)
    if tag == "array":
        found = _item(node.get("leaf"), replace(at, depth=at.depth + 1))
        if found.kind == "tensor":
            return replace(found, kind="array")
    elif isinstance(node.get("leaf"), str):
        ref = TensorRef(node["leaf"], node.get("view"), _text(node.get("flags")))
        return at.item(tag, tensor=ref)
    return at.item("unknown", value=node)


def _composite(node: Json, at: _At) -> Item:
    within = at.path or _ROOT_NAME
    parts = [_item(part, at.below(name, within=within)) for name, part in node["parts"].items()]
    meta = {"!": "meta", "v": [node.get("kind"), node.get("meta"), node.get("flags")]}
    parts.append(at.below("meta", within=within).item("meta", value=meta))
    return at.item("composite", type_name=_text(node.get("kind")), children=tuple(parts))


def is_scalar(node: Json) -> bool:
    """Whether a node is one plain number, text or None."""
    if isinstance(node, dict):
        return node.get("!") in _SCALARS
    return not isinstance(node, list)


def key_text(node: Json) -> str:
    """A dict's key as the path shows it."""
    from ckpt_core.cli.values import value_text

    return node if isinstance(node, str) else value_text(node)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
