"""Nodes: the frozen form of a state tree, between `flatten`, the codec, `unflatten` and `bind`.

None, bool, int, float and str are nodes by themselves. A tensor is a `Ref`: its number among the
tensor occurrences of the tree; what the occurrence shows of which leaf is in the `RefTable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core.types import LeafSpec

Node = Any
MAX_DEPTH = 128
"""Containers inside each other. JSON text nests about twice as deep; Python's own limit is 1000."""

MAX_SIZE = 2**62
"""Bound of sizes, strides and offsets in a skeleton."""

MAX_DIMS = 64
"""Dimensions of a tensor; torch's kernels take no more."""

MOST_FLAG_BITS = 8192
"""Python takes the square of it to name the members of a flag."""

PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str})


class Ref(int):
    """Number of a tensor occurrence."""

    __slots__ = ()


@dataclass(slots=True)
class Seq:
    """Items; `kind` and `extra` as in `kinds`."""

    kind: str
    items: Sequence[Node]
    extra: Node = None


@dataclass(slots=True)
class Map:
    """Keys and values; `kind` and `extra` as in `kinds`."""

    kind: str
    keys: Sequence[Node]
    values: Sequence[Node]
    extra: Node = None


@dataclass(slots=True)
class Record:
    """An instance of a dataclass or namedtuple, `type_name` as "module:qualname"."""

    kind: str
    type_name: str
    fields: Sequence[str]
    values: Sequence[Node]


@dataclass(slots=True)
class Obj:
    """An object with `state_dict()`, and the state that it gave."""

    type_name: str
    state: Node


@dataclass(slots=True)
class Atom:
    """An immutable value whose JSON form depends on `tag` (see atoms.py)."""

    tag: str
    value: Any


@dataclass(slots=True)
class Member:
    """A member of an Enum: by name, or by value for a Flag."""

    type_name: str
    name: str | None
    value: int | None


@dataclass(slots=True)
class Array:
    """A numpy array whose bytes are a leaf."""

    ref: Ref
    readonly: bool


@dataclass(slots=True)
class Opaque:
    """Anything else: a pickle that only the safe unpickler opens."""

    type_name: str
    data: bytes


@dataclass(slots=True)
class Composite:
    """A tensor made of others: sparse, quantized, or of a dtype that torch cannot copy."""

    kind: str
    meta: dict[str, Any]
    parts: dict[str, Ref]


@dataclass(frozen=True, slots=True)
class View:
    """What an occurrence shows of its leaf, when that is not the leaf itself.

    Attributes:
        dtype: of the view.
        offset: in bytes from the leaf's first byte.
        shape: of the view.
        stride: in elements of `dtype`, over the leaf's row-major bytes.
    """

    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class RefTable:
    """The tensor occurrences of one tree.

    Attributes:
        leaf: name of the leaf of each occurrence.
        views: occurrences that are not the whole leaf.
        flags: letters: p Parameter, g requires grad, c conjugate bit, n negative bit.
        composites: occurrences that are made of several; part 0 has the occurrence's own number.
        texts: of lists of refs alone, by id: the list, and the JSON of the container that it is in, which
            is the same one whenever the list is.
    """

    leaf: list[str] = field(default_factory=list)
    views: dict[int, View] = field(default_factory=dict)
    flags: dict[int, str] = field(default_factory=dict)
    composites: dict[int, Composite] = field(default_factory=dict)
    texts: dict[int, tuple[Sequence[Node], str]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def signature(self, number: int, specs: Mapping[str, LeafSpec]) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of the tensor that an occurrence shows of these leaves."""
        spec = specs[self.leaf[number]]
        composite = self.composites.get(number)
        if composite is not None:
            dtype = composite.meta.get("dtype", spec.dtype)
            return dtype, tuple(composite.meta.get("shape", spec.shape))
        view = self.views.get(number)
        return (spec.dtype, tuple(spec.shape)) if view is None else (view.dtype, view.shape)

    def form(self, number: int, specs: Mapping[str, LeafSpec]) -> str:
        """What must agree besides dtype and shape: layout, and what a copy cannot change."""
        composite = self.composites.get(number)
        if composite is None or composite.kind == "bits":
            return "strided"
        if composite.kind == "coo":
            return "sparse_coo"
        if composite.kind == "quantized":
            return "quantized per channel" if "axis" in composite.meta else "quantized"
        return f"{composite.meta['layout']} {list(specs[self.leaf[number]].shape)}"


@dataclass(frozen=True, slots=True)
class Pool:
    """Leaves that lie in one storage: bytes of the storage, and where each leaf starts in it."""

    nbytes: int
    offsets: dict[str, int]


@dataclass(slots=True)
class LeafTable:
    """How leaves lie in memory when it is not simply row-major and alone.

    Attributes:
        strides: in elements, of dense leaves that are not row-major.
        shifts: bytes past an aligned address where a leaf of raw bytes starts.
        pools: leaves of one storage.
    """

    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shifts: dict[str, int] = field(default_factory=dict)
    pools: list[Pool] = field(default_factory=list)
