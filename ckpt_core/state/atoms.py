"""Atoms: immutable values with a JSON form of their own, one row of a table for each kind."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import pathlib
import re
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt_core.state import arrays
from ckpt_core.state.leaf import dtype_name, dtypes

_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_BIG_INT_BITS = 8192
"""Python refuses to print or parse ints of more than 4300 digits; those travel as hex."""

_NAME = re.compile(r"[a-z]\w{0,39}\Z", re.ASCII)


class NotHere(Exception):
    """Another torch has what is named; the text is what. No ValueError: nothing is malformed."""


def check_here(name: str, kind: str) -> None:
    """Raise NotHere for a name that may be one of another torch, and is nothing in this one."""
    if _NAME.match(name) and name not in vars(torch):
        raise NotHere(f"the {kind} {name!r}")


def float_to_hex(value: float) -> str:
    """The 8 bytes of a float: the only text that keeps the payload of a NaN."""
    return struct.pack(">d", value).hex()


def _float_from_hex(text: Any) -> float:
    data = bytes.fromhex(_text(text))
    if len(data) != 8:
        raise ValueError("a float has 8 bytes")
    return float(struct.unpack(">d", data)[0])


def int_is_big(value: int) -> bool:
    """Whether JSON cannot carry this int as digits."""
    return value.bit_length() > _BIG_INT_BITS


def is_told_whole(value: dt.datetime | dt.time | dt.timezone | range) -> bool:
    """Whether the JSON of its atom says all of it; else it is pickled."""
    if isinstance(value, range):
        return not any(map(int_is_big, (value.start, value.stop, value.step)))
    zone = value if isinstance(value, dt.timezone) else value.tzinfo
    if zone is None:
        return True
    if type(zone) is not dt.timezone:
        return False
    if zone.utcoffset(None).microseconds:  # Python reads some of these back as none.
        return False
    return zone.tzname(None) == dt.timezone(zone.utcoffset(None)).tzname(None)


def has_surrogates(text: str) -> bool:
    """Whether the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def to_base64(data: bytes) -> str:
    """Text of bytes."""
    return base64.b64encode(data).decode("ascii")


def from_base64(text: Any) -> bytes:
    """Bytes of text; raises ValueError."""
    try:
        return base64.b64decode(_text(text).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as exc:
        raise ValueError("malformed base64") from exc


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


def _ints(value: Any, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"expected {count} ints")
    if any(type(item) is not int for item in value):
        raise ValueError(f"expected {count} ints")
    return value


def _parse_complex(value: Any) -> complex:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a complex number has two parts")
    return complex(_float_from_hex(value[0]), _float_from_hex(value[1]))


def _parse_path(value: Any) -> pathlib.PurePath:
    if not isinstance(value, list) or len(value) != 2 or value[0] not in _PATHS:
        raise ValueError("not a path")
    kind = value[0]
    native = type(pathlib.Path()).__name__
    if kind in ("PosixPath", "WindowsPath") and kind != native:
        kind = "Pure" + kind
    made: pathlib.PurePath = getattr(pathlib, kind)(_unescape(value[1]))
    return made


def _parse_dtype(value: Any) -> torch.dtype:
    if _text(value) not in dtypes():
        check_here(value, "dtype")
        raise ValueError(f"this torch has no dtype {value[:40]!r}")
    return dtypes()[value]


def _parse_device(value: Any) -> torch.device:
    try:
        return torch.device(_text(value))
    except RuntimeError as exc:
        check_here(value.partition(":")[0], "device")
        raise ValueError(f"{value[:40]!r} is no device") from exc


def _parse_enum_like(cls: type, value: Any) -> Any:
    found = vars(torch).get(_text(value))  # an attribute of torch may be a module that it imports
    if not isinstance(found, cls):
        check_here(value, cls.__name__)
        raise ValueError(f"{value[:40]!r} is no {cls.__name__}")
    return found


def _escape(text: str) -> str:
    return to_base64(text.encode("utf-8", "surrogatepass"))


def _unescape(text: Any) -> str:
    return from_base64(text).decode("utf-8", "surrogatepass")


def _parse_time(cls: Any) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != 2 or value[1] not in (0, 1):
            raise ValueError("not a time")
        return cls.fromisoformat(_text(value[0])).replace(fold=value[1])

    return parse


def _dump_delta(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _parse_delta(value: Any) -> dt.timedelta:
    return dt.timedelta(*_ints(value, 3))


def _parse_array(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("not an array")
    data = from_base64(value[2])
    arrays.unpack_array(value[0], value[1], data)
    return value[0], value[1], data


def _parse_scalar(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not a scalar")
    data = from_base64(value[1])
    arrays.unpack_scalar(value[0], data)
    return value[0], data


def _parse_npdtype(value: Any) -> Any:
    arrays.parse_dtype(value)
    return value


def _parse_versions(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, list) or any(
        not isinstance(row, list) or [type(item) for item in row] != [str, int] for row in value
    ):
        raise ValueError("not module versions")
    return tuple((row[0], row[1]) for row in value)


def _short(value: Any) -> str:
    """Torch's name of a value, without the prefix."""
    return str(value).removeprefix("torch.")


def _from_torch(cls: type) -> Callable[[Any], Any]:
    return lambda value: _parse_enum_like(cls, value)


class _Row(NamedTuple):
    """One kind of atom.

    Attributes:
        dump: JSON of the frozen value.
        parse: the frozen value of JSON; raises ValueError, TypeError or OverflowError.
        types: those whose instances are such atoms as they are.
        thaw: a fresh value of the tree from the frozen one; None: that itself, which is immutable.
    """

    dump: Callable[[Any], Any]
    parse: Callable[[Any], Any]
    types: tuple[type, ...] = ()
    thaw: Callable[[Any], Any] | None = None


CODEC: dict[str, _Row] = {
    "float": _Row(float_to_hex, _float_from_hex),
    "int": _Row(hex, lambda text: int(_text(text), 16)),
    "str": _Row(_escape, _unescape),
    "bytes": _Row(to_base64, from_base64, (bytes,)),
    "bytearray": _Row(to_base64, from_base64, thaw=bytearray),
    "complex": _Row(
        lambda z: [float_to_hex(z.real), float_to_hex(z.imag)], _parse_complex, (complex,)
    ),
    "range": _Row(lambda r: [r.start, r.stop, r.step], lambda v: range(*_ints(v, 3)), (range,)),
    "ellipsis": _Row(lambda _: None, lambda _: ..., (type(...),)),
    "dtype": _Row(dtype_name, _parse_dtype, (torch.dtype,)),
    "device": _Row(str, _parse_device, (torch.device,)),
    "layout": _Row(_short, _from_torch(torch.layout), (torch.layout,)),
    "memory_format": _Row(_short, _from_torch(torch.memory_format), (torch.memory_format,)),
    "path": _Row(
        lambda p: [type(p).__name__, _escape(str(p))],
        _parse_path,
        tuple(getattr(pathlib, name) for name in _PATHS),
    ),
    "date": _Row(dt.date.isoformat, lambda v: dt.date.fromisoformat(_text(v)), (dt.date,)),
    "datetime": _Row(lambda t: [t.isoformat(), t.fold], _parse_time(dt.datetime)),
    "time": _Row(lambda t: [t.isoformat(), t.fold], _parse_time(dt.time)),
    "timedelta": _Row(_dump_delta, _parse_delta, (dt.timedelta,)),
    "timezone": _Row(
        lambda zone: _dump_delta(zone.utcoffset(None)), lambda v: dt.timezone(_parse_delta(v))
    ),
    "uuid": _Row(str, lambda v: uuid.UUID(_text(v)), (uuid.UUID,)),
    "ndarray": _Row(
        lambda v: [v[0], v[1], to_base64(v[2])],
        _parse_array,
        thaw=lambda v: arrays.unpack_array(*v),
    ),
    "npscalar": _Row(
        lambda v: [v[0], to_base64(v[1])], _parse_scalar, thaw=lambda v: arrays.unpack_scalar(*v)
    ),
    "npdtype": _Row(lambda v: v, _parse_npdtype, thaw=arrays.parse_dtype),
    "versions": _Row(
        lambda v: [list(row) for row in v],
        _parse_versions,
        thaw=lambda v: OrderedDict((name, {"version": version}) for name, version in v),
    ),
}
"""By tag."""

EXACT_TYPES = {cls: tag for tag, row in CODEC.items() for cls in row.types}
"""Types whose instances are atoms as they are."""


def parse_atom(tag: str, value: Any) -> Any:
    """The frozen value of an atom's JSON; `thaw` makes the value of the tree from it.

    Raises:
        ValueError: malformed.
        NotHere: it names what this torch does not have.
    """
    try:
        return CODEC[tag].parse(value)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as exc:
        raise ValueError(f"malformed {tag}: {str(exc)[:200]}") from exc


def thaw(tag: str, value: Any) -> Any:
    """A fresh value of the tree from a frozen one: mutable values are never shared."""
    make = CODEC[tag].thaw
    return value if make is None else make(value)
