"""Checks of hostile JSON, one field at a time."""

from __future__ import annotations

from typing import Any

from ckpt_core.state.atoms import check_here, parse_atom
from ckpt_core.state.leaf import dtypes
from ckpt_core.state.nodes import MAX_DIMS, MAX_SIZE, Ref
from ckpt_core.state.special import LAYOUTS, QUANTIZED, subbyte_dtypes


class Malformed(ValueError):
    """The JSON is not what `Encoder` writes."""


def want(value: dict[str, Any], name: str, kind: type) -> Any:
    """A field of the right JSON type, or Malformed."""
    found = value.get(name)
    if type(found) is not kind:
        raise Malformed(f"a {name!r} that is no {kind.__name__}")
    return found


def want_type(value: dict[str, Any]) -> str:
    """A "module:qualname" field, or Malformed."""
    found: str = want(value, "type", str)
    if found.count(":") != 1:
        raise Malformed("a type that is not module:qualname")
    return found


def sizes(value: Any) -> tuple[int, ...]:
    """A shape, strides or offsets, or Malformed."""
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise Malformed("sizes that are no list of at most 64 ints")
    if any(type(size) is not int or not 0 <= size < MAX_SIZE for size in value):
        raise Malformed("a size out of range")
    return tuple(value)


def check_meta(kind: str, meta: dict[str, Any], parts: dict[str, Ref]) -> dict[str, Any]:
    """The metadata of a composite tensor, each field checked, or Malformed."""
    made: dict[str, Any] = {}
    if kind != "bits":
        made["shape"] = list(sizes(meta.get("shape")))
    if kind == "coo":
        made["coalesced"] = meta.get("coalesced") is True
    elif kind == "compressed":
        made["layout"] = want(meta, "layout", str)
        if made["layout"] not in LAYOUTS:
            raise Malformed("an unknown layout")
        row = "crow_indices" if made["layout"] in ("sparse_csr", "sparse_bsr") else "ccol_indices"
        if row not in parts:
            raise Malformed("parts of another layout")
    else:
        made["dtype"] = want(meta, "dtype", str)
        allowed = subbyte_dtypes() if kind == "bits" else QUANTIZED.keys()
        if dtypes().get(made["dtype"]) not in allowed:
            check_here(made["dtype"], "dtype")
            raise Malformed("a dtype of another kind")
    if kind == "quantized" and "scales" in parts:
        made["axis"] = sizes([meta.get("axis")])[0]
    elif kind == "quantized":
        scale = parse_atom("float", meta.get("scale"))
        zero = want(meta, "zero_point", int)
        if not -(2**31) <= zero < 2**31:
            raise Malformed("a zero point out of range")
        made |= {"scale": scale, "zero_point": zero}
    return made
