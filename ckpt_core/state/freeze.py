"""The walk of `flatten`: from a live state tree to nodes, tensors in the order in which they occur.

Everything that is not a tensor is frozen here, on the training thread: nothing in the nodes is an
object that training may change later. Tensors are only noted.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, TypedStorage, UntypedStorage
from torch.nn import Parameter

from ckpt_core.errors import ConfigError
from ckpt_core.state import arrays
from ckpt_core.state.atoms import EXACT_TYPES, is_told_whole
from ckpt_core.state.distributed import FlatPart, Placer, Unplaced, is_distributed
from ckpt_core.state.kinds import KINDS, Kind, Unnamed
from ckpt_core.state.nodes import (
    MAX_DEPTH,
    MOST_FLAG_BITS,
    PLAIN,
    Array,
    Atom,
    Map,
    Member,
    Node,
    Obj,
    Record,
    Ref,
    Seq,
)
from ckpt_core.state.opaque import pickle_opaque
from ckpt_core.state.plain import has_state
from ckpt_core.state.records import check_reachable, fields_alone, type_name
from ckpt_core.state.runs import Run, rows_of, run_of
from ckpt_core.state.special import instead_of
from ckpt_core.types import Placement

TENSORS: frozenset[type] = frozenset({Tensor, Parameter})
_Handler = Callable[["Walker", Any, str], Node]


def shown(path: str) -> str:
    """A path for messages."""
    return repr(path) if path else "the state itself"


class Walker:
    """One walk. `segments` says to which object the tensors from a number on belong, `arrays` which are
    the memory of NumPy arrays.

    A DTensor or FlatPart is noted by its local part; `placements` and `flags` hold what that does not tell.

    Args:
        before: `runs` of the last walk; nodes and names of those that come again are used again.

    Attributes:
        runs: containers of tensors, or of dicts of them, alone, in the order in which they were met.
    """

    def __init__(self, placer: Placer, before: Sequence[Run] = ()) -> None:
        self.runs: list[Run] = []
        self._before = before
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.segments: list[tuple[int, object]] = [(0, None)]
        self.placements: dict[int, Placement] = {}
        self.flags: dict[int, str] = {}
        self.arrays: list[int] = []
        self._placer = placer
        self._active: dict[int, None] = {}
        self._arrays: dict[int, tuple[Any, Tensor | None]] = {}

    def node(self, value: Any, path: str) -> Node:
        """The node of any value.

        Raises:
            ConfigError: it holds itself, nests too deeply, or cannot be stored.
        """
        cls = type(value)
        if cls in PLAIN:
            return value
        return (_HANDLERS.get(cls) or _handler(cls))(self, value, path)

    def container(self, value: object, path: str, children: Callable[[], Node]) -> Node:
        """Run `children` with `value` marked as being walked."""
        if id(value) in self._active:
            raise ConfigError(
                f"{shown(path)} contains itself: a checkpoint holds trees; break the cycle"
            )
        if len(self._active) >= MAX_DEPTH:
            raise ConfigError(
                f"the state nests more than {MAX_DEPTH} containers at {shown(path[:200])}:"
                " make it flatter"
            )
        self._active[id(value)] = None
        try:
            return children()
        except RecursionError as exc:
            raise ConfigError(
                f"the state nests too deeply for Python's stack at {shown(path[:200])}:"
                " make it flatter"
            ) from exc
        finally:
            self._active.pop(id(value), None)

    def ref(self, tensor: Tensor, path: str) -> Ref:
        """Note one tensor."""
        number = Ref(len(self.tensors))
        self.tensors.append(tensor)
        self.names.append(path)
        return number

    def local_part(self, tensor: Any, path: str) -> Ref:
        """Note one DTensor or FlatPart."""
        try:
            local, placement = self._placer.place(tensor)
        except Unplaced as exc:
            raise ConfigError(f"{shown(path)} {exc}") from exc
        number = self.ref(local, path)
        self.placements[number] = placement
        if isinstance(tensor, FlatPart):
            return number
        flags = "p" if isinstance(tensor, Parameter) else ""
        if tensor.requires_grad and tensor.is_leaf:
            flags += "g"
        if flags:
            self.flags[number] = flags
        return number

    def values(self, values: Sequence[Any], names: Sequence[object], path: str) -> list[Node]:
        """Nodes of a container's values; runs of one kind are handled as a whole.

        Args:
            names: texts, or numbers.
        """
        kinds = set(map(type, values))
        if kinds <= PLAIN:
            return list(values)
        prefix = f"{path}." if path else ""
        first = len(self.tensors)
        if kinds <= TENSORS:
            run = run_of(self._before_here(), prefix, names, first, len(values))
            return self._note(run, values)
        if kinds == {dict} and len(self._active) < MAX_DEPTH:
            found = list(chain.from_iterable(map(dict.values, values)))
            if set(map(type, found)) <= TENSORS and all(values):
                rows = rows_of(self._before_here(), prefix, names, first, values)
                if rows is not None:
                    return self._note(rows, found)
        node = self.node
        return [
            value if type(value) in PLAIN else node(value, f"{prefix}{name}")
            for value, name in zip(values, names, strict=True)
        ]

    def _note(self, run: Run, tensors: Sequence[Tensor]) -> list[Node]:
        self.runs.append(run)
        self.tensors.extend(tensors)
        self.names.extend(run.names)
        return run.refs

    def _before_here(self) -> Run | None:
        place = len(self.runs)
        return self._before[place] if place < len(self._before) else None

    def mapping(self, value: dict[Any, Any], path: str, kind: str) -> Map:
        """Node of a dict of any of the known kinds, without its extra."""

        def children() -> Node:
            keys: list[Any] = list(value)
            kinds = set(map(type, keys))
            nodes = keys if kinds <= PLAIN else [self.key(key, path) for key in keys]
            names = keys if kinds <= {str} else _texts(keys, path)
            return Map(kind, nodes, self.values(list(value.values()), names, path))

        made: Map = self.container(value, path, children)
        return made

    def key(self, key: Any, path: str) -> Node:
        """Node of a dict's key: any hashable value without tensors in it."""
        count = len(self.tensors)
        node = self.node(key, path)
        if len(self.tensors) != count:
            raise ConfigError(
                f"{shown(path)} has a tensor as a key: use names or numbers as keys"
                " (for an optimizer, pass the optimizer itself or its state_dict())"
            )
        return node

    def sequence(self, value: Any, path: str, kind: str) -> Seq:
        """Node of a list, tuple, set, ..., without its extra."""

        def children() -> Node:
            items = list(value)
            return Seq(kind, self.values(items, range(len(items)), path))

        made: Seq = self.container(value, path, children)
        return made

    def array(self, value: Any, path: str) -> Node:
        """Node of a numpy array; the same array met again is the same tensor."""
        known = self._arrays.get(id(value))
        tensor = arrays.as_tensor(value) if known is None else known[1]
        self._arrays[id(value)] = (value, tensor)
        if tensor is not None:
            self.arrays.append(len(self.tensors))
            return Array(self.ref(tensor, path), not value.flags.writeable)
        packed = arrays.pack_array(value)
        return pickle_opaque(value, shown(path)) if packed is None else Atom("ndarray", packed)


def _texts(keys: Sequence[Any], path: str) -> list[str]:
    try:
        return list(map(str, keys))
    except ValueError as exc:  # Python prints no int of more than 4300 digits.
        raise ConfigError(f"{shown(path)} has a key that cannot be shown: {exc}") from exc


def _container(kind: Kind) -> _Handler:
    """Handler of one kind of container."""
    freeze: Any = Walker.mapping if kind.form is Map else Walker.sequence
    take, tag = kind.take, kind.tag
    if not kind.extra:
        return lambda walker, value, path: freeze(
            walker, value if take is None else take(value), path, tag
        )

    def handler(walker: Walker, value: Any, path: str) -> Node:
        try:
            extra = kind.note(value)
        except Unnamed:
            return pickle_opaque(value, shown(path))
        node = freeze(walker, value, path, tag)
        node.extra = _attributes(walker, extra, path) if type(extra) is dict else extra
        return node

    return handler


def _attributes(walker: Walker, own: dict[str, Any], path: str) -> Map:
    """An OrderedDict's own attributes: `_metadata` of a module's state, with thousands of rows."""
    rows = own.get("_metadata")
    if len(own) == 1 and type(rows) is OrderedDict and not vars(rows):
        found = tuple([(name, row.get("version")) for name, row in rows.items() if len(row) == 1])
        if len(found) == len(rows) and all(
            type(name) is str and type(version) is int for name, version in found
        ):
            return Map("dict", ["_metadata"], [Atom("versions", found)])
    if not all(type(name) is str for name in own):
        raise ConfigError(f"{shown(path)} has an attribute whose name is no text: take it off")
    return walker.mapping(own, f"{path}.__dict__", "dict")


def _checked(walker: Walker, value: Any, path: str) -> Node:
    if not is_told_whole(value):
        return pickle_opaque(value, shown(path))
    return Atom(type(value).__name__, value)


def _atom(walker: Walker, value: Any, path: str) -> Node:
    return Atom(EXACT_TYPES[type(value)], value)


def _opaque(walker: Walker, value: Any, path: str) -> Node:
    return pickle_opaque(value, shown(path))


_HANDLERS: dict[type, _Handler] = {
    Tensor: lambda walker, value, path: walker.ref(value, path),
    Parameter: lambda walker, value, path: walker.ref(value, path),
    FlatPart: lambda walker, value, path: walker.local_part(value, path),
    **{kind.type: _container(kind) for kind in KINDS.values() if kind.module},
    bytearray: lambda walker, value, path: Atom("bytearray", bytes(value)),
    **dict.fromkeys(EXACT_TYPES, _atom),
    **dict.fromkeys((dt.datetime, dt.time, dt.timezone, range), _checked),
}


def _handler(cls: type) -> _Handler:
    """Handler of a type that is not in the table."""
    if issubclass(cls, Tensor):
        return _tensor_subclass
    if issubclass(cls, enum.Enum):
        return _member
    if issubclass(cls, UntypedStorage | TypedStorage):
        return _storage
    if sys.modules.get("numpy") is not None:
        import numpy as np

        if cls in (np.ndarray, np.memmap):  # a mapped file's values are saved, not where it is
            return Walker.array
        if issubclass(cls, np.generic):
            return _npscalar
        if issubclass(cls, np.dtype):
            return _npdtype
    return _value


def _storage(walker: Walker, value: Any, path: str) -> Node:
    # torch pickles it, and fails to read that.
    raise ConfigError(
        f"{shown(path)} is a {type_name(type(value))}, which cannot be stored: store a tensor of its bytes"
    )


def _value(walker: Walker, value: Any, path: str) -> Node:
    """What has no handler of its own, judged as `restore` judges it: by the instance, not its class."""
    if has_state(value):
        return _object(walker, value, path)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _namedtuple(walker, value, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(walker, value, path)
    return _opaque(walker, value, path)


def _tensor_subclass(walker: Walker, value: Any, path: str) -> Node:
    cls = type(value)
    if is_distributed(cls):
        return walker.local_part(value, path)
    raise ConfigError(
        f"{shown(path)} is a {type_name(cls)}, not a plain tensor: {instead_of(value)}"
    )


def _member(walker: Walker, value: Any, path: str) -> Node:
    cls = type(value)
    check_reachable(cls, shown(path))
    if isinstance(value, enum.Flag) and type(value._value_) is int:
        if value._value_.bit_length() <= MOST_FLAG_BITS:
            return Member(type_name(cls), None, value._value_)
    elif cls.__members__.get(value._name_) is value:
        return Member(type_name(cls), value._name_, None)
    return pickle_opaque(value, shown(path))  # also what a `_missing_` has made


def _object(walker: Walker, value: Any, path: str) -> Node:
    def children() -> Node:
        outer = walker.segments[-1][1]
        if outer is None and not callable(getattr(value, "load_state_dict", None)):
            raise ConfigError(
                f"{shown(path)} is a {type_name(type(value))}, which has state_dict() and no"
                " load_state_dict(), so that nothing could restore it: give it one, or save what its"
                " state_dict() returns"
            )
        walker.segments.append((len(walker.tensors), value))
        node = Obj(type_name(type(value)), walker.node(value.state_dict(), path))
        walker.segments.append((len(walker.tensors), outer))
        return node

    return walker.container(value, path, children)


def _npscalar(walker: Walker, value: Any, path: str) -> Node:
    described = arrays.describe_dtype(value.dtype)
    if described is None:
        return pickle_opaque(value, shown(path))
    return Atom("npscalar", (described, value.tobytes()))


def _npdtype(walker: Walker, value: Any, path: str) -> Node:
    described = arrays.describe_dtype(value)
    return pickle_opaque(value, shown(path)) if described is None else Atom("npdtype", described)


def _record(walker: Walker, value: Any, path: str, kind: str, fields: Sequence[str]) -> Node:
    check_reachable(type(value), shown(path))

    def children() -> Node:
        found = [getattr(value, name) for name in fields]
        nodes = walker.values(found, fields, path)
        return Record(kind, type_name(type(value)), list(fields), nodes)

    return walker.container(value, path, children)


def _namedtuple(walker: Walker, value: Any, path: str) -> Node:
    if getattr(value, "__dict__", None) or len(value) != len(value._fields):
        return pickle_opaque(value, shown(path))
    return _record(walker, value, path, "namedtuple", value._fields)


def _dataclass(walker: Walker, value: Any, path: str) -> Node:
    fields = fields_alone(value)
    if fields is None:
        return pickle_opaque(value, shown(path))
    return _record(walker, value, path, "dataclass", fields)
