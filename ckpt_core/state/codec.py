"""Nodes <-> JSON. Every JSON object is a node, `{"!": tag, ...}`; a JSON list is a Python list.

Decoding treats its input as hostile: each field is checked before it is used, and nothing is
imported, called or allocated by a size that the input claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ckpt_core.state.atoms import (
    CODEC,
    float_to_hex,
    from_base64,
    has_surrogates,
    int_is_big,
    parse_atom,
    to_base64,
)
from ckpt_core.state.checks import Malformed, check_meta, sizes, want, want_type
from ckpt_core.state.keys import Keys, Work
from ckpt_core.state.kinds import KINDS, Kind
from ckpt_core.state.leaf import dtypes
from ckpt_core.state.nodes import (
    MAX_DEPTH,
    MAX_SIZE,
    PLAIN,
    Array,
    Atom,
    Composite,
    Map,
    Member,
    Node,
    Obj,
    Opaque,
    Record,
    Ref,
    RefTable,
    Seq,
    View,
)

_KEY_UNITS = 2**25
_FLAGS = frozenset({"", "p", "g", "pg", "c", "n", "cn", "pc", "pn", "gc", "gn", "gcn", "pcn"})
_FLAGS |= {"pgc", "pgn", "pgcn"}
_PARTS = {
    "bits": ({"values"},),
    "coo": ({"values", "indices"},),
    "quantized": ({"values"}, {"values", "scales", "zero_points"}),
    "compressed": (
        {"values", "crow_indices", "col_indices"},
        {"values", "ccol_indices", "row_indices"},
    ),
}


class Encoder:
    """JSON of nodes whose refs are numbers in `refs`."""

    def __init__(self, refs: RefTable) -> None:
        self._refs = refs

    def encode(self, node: Node) -> Any:
        """The JSON value of one node."""
        return _ENCODERS[type(node)](self, node)

    def int(self, node: int) -> Any:
        return {"!": "int", "v": hex(node)} if int_is_big(node) else node

    def float(self, node: float) -> Any:
        if math.isfinite(node) and (node or math.copysign(1.0, node) > 0):
            return node
        return {"!": "float", "v": float_to_hex(node)}

    def str(self, node: str) -> Any:
        return {"!": "str", "v": CODEC["str"].dump(node)} if has_surrogates(node) else node

    def seq(self, node: Seq) -> Any:
        items = [self.encode(item) for item in node.items]
        if node.kind == "list":
            return items
        kind = KINDS[node.kind]
        if kind.hashed:
            items.sort(key=repr)  # The order of a set differs from run to run.
        return {"!": node.kind, "v": items} | self._extra(kind, node)

    def map(self, node: Map) -> Any:
        values = [self.encode(value) for value in node.values]
        made: dict[str, Any] = {"!": node.kind}
        if all(type(key) is str and not has_surrogates(key) for key in node.keys):
            made["v"] = dict(zip(node.keys, values, strict=True))
        else:
            keys = [self.encode(key) for key in node.keys]
            made["items"] = [list(row) for row in zip(keys, values, strict=True)]
        return made | self._extra(KINDS[node.kind], node)

    def _extra(self, kind: Kind, node: Seq | Map) -> Any:
        return {} if node.extra is None else {kind.extra: self.encode(node.extra)}

    def record(self, node: Record) -> Any:
        values = [self.encode(value) for value in node.values]
        fields = [list(row) for row in zip(node.fields, values, strict=True)]
        return {"!": node.kind, "type": node.type_name, "fields": fields}

    def obj(self, node: Obj) -> Any:
        return {"!": "object", "type": node.type_name, "state": self.encode(node.state)}

    def atom(self, node: Atom) -> Any:
        return {"!": node.tag, "v": CODEC[node.tag].dump(node.value)}

    def member(self, node: Member) -> Any:
        held = {"name": node.name} if node.name is not None else {"value": self.encode(node.value)}
        return {"!": "enum", "type": node.type_name} | held

    def array(self, node: Array) -> Any:
        made = {"!": "array", "leaf": self.encode(node.ref)}
        return made | {"readonly": True} if node.readonly else made

    def opaque(self, node: Opaque) -> Any:
        return {"!": "opaque", "type": node.type_name, "v": to_base64(node.data)}

    def ref(self, node: Ref) -> Any:
        composite = self._refs.composites.get(node)
        if composite is None:
            return self._plain_ref(node)
        parts = {name: self._plain_ref(part) for name, part in composite.parts.items()}
        made = {"!": "composite", "kind": composite.kind, "parts": parts}
        made["meta"] = {name: self._meta(value) for name, value in composite.meta.items()}
        flags = self._refs.flags.get(node)
        if flags is not None:
            made["flags"] = flags
            del parts["values"]["flags"]
        return made

    def _meta(self, value: Any) -> Any:
        return float_to_hex(value) if type(value) is float else value

    def _plain_ref(self, node: Ref) -> Any:
        made: dict[str, Any] = {"!": "tensor", "leaf": self._refs.leaf[node]}
        view = self._refs.views.get(node)
        if view is not None:
            made["view"] = [view.dtype, view.offset, list(view.shape), list(view.stride)]
        flags = self._refs.flags.get(node)
        if flags is not None:
            made["flags"] = flags
        return made


_ENCODERS: dict[type, Callable[[Encoder, Any], Any]] = {
    type(None): lambda _, node: node,
    bool: lambda _, node: node,
    int: Encoder.int,
    float: Encoder.float,
    str: Encoder.str,
    Seq: Encoder.seq,
    Map: Encoder.map,
    Record: Encoder.record,
    Obj: Encoder.obj,
    Atom: Encoder.atom,
    Member: Encoder.member,
    Array: Encoder.array,
    Opaque: Encoder.opaque,
    Ref: Encoder.ref,
}


class Decoder:
    """Nodes of JSON; fills `refs` as it meets tensors."""

    def __init__(self) -> None:
        self.refs = RefTable()
        self._work = Work(_KEY_UNITS)

    def decode(self, value: Any, depth: int = 0) -> Node:
        """The node of one JSON value.

        Raises:
            Malformed: it is not what an Encoder writes.
        """
        if depth > 2 * MAX_DEPTH:
            raise Malformed("nested too deeply")
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise Malformed("a bare infinity or NaN")
            return value
        if isinstance(value, list):
            return Seq("list", [self.decode(item, depth + 1) for item in value])
        if not isinstance(value, dict):
            raise Malformed(f"a {type(value).__name__}")
        tag = value.get("!")
        if not isinstance(tag, str):
            raise Malformed("an object without a tag")
        return self._tagged(tag, value, depth + 1)

    def _tagged(self, tag: str, value: dict[str, Any], depth: int) -> Node:
        if tag in CODEC:
            return self._atom(tag, value)
        if tag in KINDS:
            kind = KINDS[tag]
            return _FORMS[kind.form](self, kind, value, depth)
        method = _DECODERS.get(tag)
        if method is None:
            raise Malformed(f"the unknown tag {tag[:40]!r}")
        return method(self, value, depth)

    def _atom(self, tag: str, value: dict[str, Any]) -> Node:
        try:
            made = parse_atom(tag, value.get("v"))
        except ValueError as exc:
            raise Malformed(str(exc)) from exc
        return made if tag in ("int", "float", "str") else Atom(tag, made)

    def _seq(self, kind: Kind, value: dict[str, Any], depth: int) -> Node:
        items = [self.decode(item, depth) for item in want(value, "v", list)]
        return Seq(kind.tag, items, self._extra(kind, value, items, depth))

    def _extra(self, kind: Kind, value: dict[str, Any], items: list[Node], depth: int) -> Node:
        extra = self.decode(value.get(kind.extra), depth) if kind.extra else None
        if not kind.fits(items, extra):
            raise Malformed(f"a {kind.tag} of parts that it cannot have")
        return extra

    def _map(self, kind: Kind, value: dict[str, Any], depth: int) -> Node:
        keys: list[Node]
        if "v" in value:
            held = want(value, "v", dict)
            if not all(isinstance(key, str) for key in held):
                raise Malformed("a key that is no text")
            keys = list(held)  # texts: their hashes cannot be foreseen
            values = [self.decode(item, depth) for item in held.values()]
        else:
            rows = _rows(value, "items")
            keys = [self.decode(key, depth) for key, _ in rows]
            values = [self.decode(item, depth) for _, item in rows]
        Keys(self._work).add(key for key in keys if type(key) in PLAIN)
        return Map(kind.tag, keys, values, self._extra(kind, value, keys, depth))

    def _record(self, kind: Kind, value: dict[str, Any], depth: int) -> Node:
        rows = _rows(value, "fields")
        names = [name for name, _ in rows]
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise Malformed("a field without a name of its own")
        values = [self.decode(item, depth) for _, item in rows]
        return Record(kind.tag, want_type(value), names, values)

    def _object(self, value: dict[str, Any], depth: int) -> Node:
        if "state" not in value:
            raise Malformed("an object without a state")
        return Obj(want_type(value), self.decode(value["state"], depth))

    def _member(self, value: dict[str, Any], depth: int) -> Node:
        if "name" in value:
            return Member(want_type(value), want(value, "name", str), None)
        number = self.decode(value.get("value"), depth)
        if type(number) is not int:
            raise Malformed("a flag without a value")
        return Member(want_type(value), None, number)

    def _array(self, value: dict[str, Any], depth: int) -> Node:
        ref = self.decode(value.get("leaf"), depth)
        if not isinstance(ref, Ref) or ref in self.refs.composites or ref in self.refs.flags:
            raise Malformed("an array that is no leaf")
        return Array(ref, value.get("readonly") is True)

    def _opaque(self, value: dict[str, Any], depth: int) -> Node:
        try:
            data = from_base64(value.get("v"))
        except ValueError as exc:
            raise Malformed(str(exc)) from exc
        return Opaque(want(value, "type", str), data)

    def _composite(self, value: dict[str, Any], depth: int) -> Node:
        kind, raw = want(value, "kind", str), want(value, "parts", dict)
        if kind not in _PARTS or set(raw) not in _PARTS[kind]:
            raise Malformed("a composite tensor of unknown parts")
        parts: dict[str, Ref] = {}
        for name in sorted(raw, key=lambda name: name != "values"):
            part = self.decode(raw[name], depth)
            if not isinstance(part, Ref) or part in self.refs.composites:
                raise Malformed("a part that is no leaf")
            parts[name] = part
        meta = check_meta(kind, want(value, "meta", dict), parts)
        number = parts["values"]
        self._flags(number, value)
        self.refs.composites[number] = Composite(kind, meta, parts)
        return number

    def _flags(self, number: Ref, value: dict[str, Any]) -> None:
        if "flags" in value:
            flags = want(value, "flags", str)
            if flags not in _FLAGS:
                raise Malformed("unknown flags of a tensor")
            self.refs.flags[number] = flags

    def _tensor(self, value: dict[str, Any], depth: int) -> Node:
        number = Ref(len(self.refs.leaf))
        self.refs.leaf.append(want(value, "leaf", str))
        self._flags(number, value)
        if "view" in value:
            row = want(value, "view", list)
            if len(row) != 4 or not isinstance(row[0], str) or row[0] not in dtypes():
                raise Malformed("a view of unknown form")
            shape, stride = sizes(row[2]), sizes(row[3])
            if len(shape) != len(stride):
                raise Malformed("a view with other numbers of sizes and strides")
            if math.prod(shape) >= MAX_SIZE:
                raise Malformed("a view of an impossible shape")
            self.refs.views[number] = View(row[0], sizes([row[1]])[0], shape, stride)
        return number


def _rows(value: dict[str, Any], name: str) -> list[list[Any]]:
    """A field that is a list of pairs, or Malformed."""
    rows: list[Any] = want(value, name, list)
    if any(not isinstance(row, list) or len(row) != 2 for row in rows):
        raise Malformed(f"{name} that are not pairs")
    return rows


_FORMS: dict[type, Callable[[Decoder, Kind, dict[str, Any], int], Node]] = {
    Seq: Decoder._seq,
    Map: Decoder._map,
    Record: Decoder._record,
}
_DECODERS: dict[str, Callable[[Decoder, dict[str, Any], int], Node]] = {
    "object": Decoder._object,
    "enum": Decoder._member,
    "array": Decoder._array,
    "opaque": Decoder._opaque,
    "composite": Decoder._composite,
    "tensor": Decoder._tensor,
}
