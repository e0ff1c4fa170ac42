"""Plain values of a skeleton as text, from their JSON: see docs/format.md for the tags."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import struct
from collections.abc import Callable
from typing import Any

from ckpt_core.cli.text import shorten
from ckpt_core.state import KINDS, Kind, Map

Json = Any
_MOST = 72
_MOST_OF_ITEMS = 48
_SHOWN_ITEMS = 8


def value_text(node: Json) -> str:
    """A value, on one line and not much longer than one; never raises, whatever the JSON is."""
    if isinstance(node, str):
        return shorten(repr(node[: _MOST + 1]), _MOST)
    if isinstance(node, int) and not isinstance(node, bool) and node.bit_length() > 256:
        return f"int of {node.bit_length()} bits"
    if node is None or isinstance(node, bool | int | float):
        return repr(node)
    if isinstance(node, list):
        return _sequence(KINDS["list"], node)
    if not isinstance(node, dict):
        return "unknown"
    tag, value = node.get("!"), node.get("v")
    tag = tag if isinstance(tag, str) else "unknown"
    kind = KINDS.get(tag)
    if kind is not None and kind.ends and isinstance(value, list):
        return _sequence(kind, value)
    if tag in _TEXTS:
        # Hostile input: what is not of the tag's form is shown as JSON.
        with contextlib.suppress(ValueError, TypeError, LookupError, struct.error):
            return shorten(_TEXTS[tag](node), _MOST)
    return shorten(f"{tag}: {_brief(value)}", _MOST)


def _sequence(kind: Kind, items: list[Json]) -> str:
    if kind.tag == "set" and not items:
        return "set()"
    name = "" if kind.tag in ("list", "tuple", "set") else kind.tag
    shown: list[str] = []
    for item in items:
        shown.append(value_text(item))
        if sum(map(len, shown)) > _MOST_OF_ITEMS:
            shown[1 if len(shown) == 1 else -1 :] = ["..."]
            break
    if len(shown) < len(items) or shown[-1:] == ["..."]:
        shown.append("1 value" if len(items) == 1 else f"{len(items)} values")
    comma = "," if kind.tag == "tuple" and len(items) == 1 else ""
    return f"{name}{kind.ends[0]}{', '.join(shown)}{comma}{kind.ends[1]}"


def _brief(value: Json) -> str:
    if isinstance(value, dict | list):
        text = json.dumps(value) if len(value) <= _SHOWN_ITEMS else f"{len(value)} values"
        return shorten(text, _MOST)
    return value_text(value)


def _float(digits: Json) -> float:
    return float(struct.unpack(">d", bytes.fromhex(digits))[0])


def _bytes(text: Json) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as exc:
        raise ValueError("no base64") from exc


def _escaped(text: Json) -> str:
    return _bytes(text).decode("utf-8", "surrogatepass")


def _complex(node: dict[str, Json]) -> str:
    real, imaginary = node["v"]
    return repr(complex(_float(real), _float(imaginary)))


def _array(node: dict[str, Json]) -> str:
    return f"array of {_brief(node['v'][0])}, shape {_brief(node['v'][1])}"


def _scalar(node: dict[str, Json]) -> str:
    return f"numpy {_brief(node['v'][0])}, {len(_bytes(node['v'][1]))} bytes"


def _opaque(node: dict[str, Json]) -> str:
    return f"pickled {node['type']}, {len(_bytes(node['v']))} bytes"


def _enum(node: dict[str, Json]) -> str:
    return f"{node['type']} {node['name'] if 'name' in node else _brief(node.get('value'))}"


def _timedelta(node: dict[str, Json]) -> str:
    days, seconds, micros = node["v"]
    return f"timedelta {days * 86400 + seconds + micros / 1e6:g} s"


_TEXTS: dict[str, Callable[[dict[str, Json]], str]] = {
    "float": lambda node: repr(_float(node["v"])),
    "int": lambda node: f"int {node['v']:.24}...",
    "str": lambda node: repr(_escaped(node["v"])),
    "complex": _complex,
    "bytes": lambda node: repr(_bytes(node["v"])),
    "bytearray": lambda node: f"bytearray({_bytes(node['v'])!r})",
    "path": lambda node: f"path {_escaped(node['v'][1])}",
    "ndarray": _array,
    "npscalar": _scalar,
    "npdtype": lambda node: f"numpy dtype {_brief(node['v'])}",
    "dtype": lambda node: f"torch.{node['v']}",
    "layout": lambda node: f"torch.{node['v']}",
    "memory_format": lambda node: f"torch.{node['v']}",
    "device": lambda node: f"device {node['v']}",
    "versions": lambda node: f"versions of {len(node['v'])} modules",
    "range": lambda node: f"range({', '.join(map(str, node['v']))})",
    "ellipsis": lambda _: "...",
    "timedelta": _timedelta,
    "opaque": _opaque,
    "enum": _enum,
    "date": lambda node: f"date {node['v']}",
    "uuid": lambda node: f"uuid {node['v']}",
    "datetime": lambda node: f"datetime {node['v'][0]}",
    "time": lambda node: f"time {node['v'][0]}",
    **dict.fromkeys(
        (tag for tag, kind in KINDS.items() if kind.form is Map), lambda node: f"empty {node['!']}"
    ),
}
