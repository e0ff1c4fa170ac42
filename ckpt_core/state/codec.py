"""Nodes <-> JSON. Every JSON object is a node, `{"!": tag, ...}`; a JSON list is a Python list.

Decoding treats its input as hostile: each field is checked before it is used, and nothing is
imported, called or allocated by a size that the input claims.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from ckpt_core.state.atoms import (
    CODEC,
    check_here,
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
    """JSON text of nodes whose refs are numbers in `refs`. Any thread; may run beside others."""

    def __init__(self, refs: RefTable) -> None:
        self._refs = refs

    def encode(self, node: Node) -> str:
        """The JSON text of one node."""
        return _ENCODERS[type(node)](self, node)

    def integer(self, node: int) -> str:
        return _object("int", v=_dump(hex(node))) if int_is_big(node) else repr(node)

    def real(self, node: float) -> str:
        if math.isfinite(node) and (node or math.copysign(1.0, node) > 0):
            return repr(node)
        return _object("float", v=_dump(float_to_hex(node)))

    def text(self, node: str) -> str:
        if has_surrogates(node):
            return _object("str", v=_dump(CODEC["str"].dump(node)))
        return quote(node)

    def seq(self, node: Seq) -> str:
        if KINDS[node.kind].hashed:
            text = _list(sorted(self._all(node.items)))  # Its order differs from run to run.
        else:
            text = self._kept(node.items, lambda: _list(self._all(node.items)))
        return text if node.kind == "list" else _object(node.kind, v=text, **self._extra(node))

    def map(self, node: Map) -> str:
        if set(map(type, node.keys)) <= {str} and not has_surrogates("".join(node.keys)):
            text = self._kept(node.values, lambda: self._rows(node))
            return _object(node.kind, v=text, **self._extra(node))
        rows = _pairs(self._all(node.keys), self._all(node.values))
        return _object(node.kind, items=rows, **self._extra(node))

    def _rows(self, node: Map) -> str:
        values = self._all(node.values)
        rows = [f"{quote(key)}:{value}" for key, value in zip(node.keys, values, strict=True)]
        return f"{{{','.join(rows)}}}"

    def _kept(self, nodes: Sequence[Node], made: Callable[[], str]) -> str:
        """The text of a container; of one of tensors alone it is made once, since they come again."""
        texts = self._refs.texts
        found = texts.get(id(nodes))
        if found is not None:
            return found[1]
        text = made()
        if set(map(type, nodes)) == {Ref}:
            # With what the id is of: it belongs to somebody else once that is gone.
            texts[id(nodes)] = nodes, text
        return text

    def _all(self, nodes: Sequence[Node]) -> list[str]:
        # The state of a generator is hundreds of small ints; there may be several in a step.
        if set(map(type, nodes)) == {int} and not int_is_big(max(map(abs, nodes))):
            return list(map(repr, nodes))
        encoders = _ENCODERS
        return [encoders[type(node)](self, node) for node in nodes]

    def _extra(self, node: Seq | Map) -> dict[str, str]:
        return {} if node.extra is None else {KINDS[node.kind].extra: self.encode(node.extra)}

    def record(self, node: Record) -> str:
        fields = _pairs(map(quote, node.fields), self._all(node.values))
        return _object(node.kind, type=quote(node.type_name), fields=fields)

    def obj(self, node: Obj) -> str:
        return _object("object", type=quote(node.type_name), state=self.encode(node.state))

    def atom(self, node: Atom) -> str:
        return _object(node.tag, v=_dump(CODEC[node.tag].dump(node.value)))

    def member(self, node: Member) -> str:
        type_name = quote(node.type_name)
        if node.name is not None:
            return _object("enum", type=type_name, name=quote(node.name))
        return _object("enum", type=type_name, value=self.encode(node.value))

    def array(self, node: Array) -> str:
        more = {"readonly": "true"} if node.readonly else {}
        return _object("array", leaf=self.encode(node.ref), **more)

    def opaque(self, node: Opaque) -> str:
        return _object("opaque", type=quote(node.type_name), v=quote(to_base64(node.data)))

    def ref(self, node: Ref) -> str:
        composite = self._refs.composites.get(node)
        flags = self._flags(node)
        if composite is None:
            return self._plain_ref(node, **flags)
        parts = [
            f"{quote(name)}:{self._plain_ref(part, **({} if part == node else self._flags(part)))}"
            for name, part in composite.parts.items()
        ]
        meta = _dump({name: self._meta(value) for name, value in composite.meta.items()})
        rest = {"parts": f"{{{','.join(parts)}}}", "meta": meta, **flags}
        return _object("composite", kind=quote(composite.kind), **rest)

    def _meta(self, value: Any) -> Any:
        return float_to_hex(value) if type(value) is float else value

    def _flags(self, node: Ref) -> dict[str, str]:
        flags = self._refs.flags.get(node)
        return {} if flags is None else {"flags": quote(flags)}

    def _plain_ref(self, node: Ref, **more: str) -> str:
        view = self._refs.views.get(node)
        if view is not None:
            row = [view.dtype, view.offset, list(view.shape), list(view.stride)]
            more = {"view": _dump(row), **more}
        return _object("tensor", leaf=quote(self._refs.leaf[node]), **more)


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _object(tag: str, **members: str) -> str:
    """A node's JSON, of members that are JSON."""
    return f'{{"!":"{tag}"{"".join([f""","{name}":{text}""" for name, text in members.items()])}}}'


def _list(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


def _pairs(left: Iterable[str], right: Iterable[str]) -> str:
    return _list([f"[{one},{other}]" for one, other in zip(left, right, strict=True)])


_ENCODERS: dict[type, Callable[[Encoder, Any], str]] = {
    type(None): lambda _, node: "null",
    bool: lambda _, node: "true" if node else "false",
    int: Encoder.integer,
    float: Encoder.real,
    str: Encoder.text,
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
            NotHere: it names what this torch does not have.
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
            if len(row) != 4 or not isinstance(row[0], str):
                raise Malformed("a view of unknown form")
            if row[0] not in dtypes():
                check_here(row[0], "dtype")
                raise Malformed("a view of no dtype")
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
