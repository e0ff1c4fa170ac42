"""Numpy arrays and scalars: bytes that torch can hold become leaves, others go into the skeleton.

numpy is optional: nothing here runs unless the state, or the checkpoint, holds numpy values.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

_TORCH_KINDS = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    " complex64 complex128".split()
)
_DTYPE_TEXT = re.compile(
    r"[<>|=]?(\?|[biufcSUV?]\d{1,9}|[mM]8(\[([1-9]\d{0,8})?[a-zA-Zμ]{1,7}\])?)\Z"
)
_MAX_FIELDS = 4096
_MAX_EMPTY = 4096


class _Writable:
    """Shows an array's memory as writable, since torch refuses to alias a read-only array."""

    def __init__(self, array: Any) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        interface["strides"] = array.strides
        self.__array_interface__ = interface


def as_tensor(array: Any) -> Tensor | None:
    """Tensor over the array's memory; a copy for strides, and None for dtypes, that torch lacks."""
    import numpy as np

    if array.dtype.name not in _TORCH_KINDS or not array.dtype.isnative:
        return None
    # Of two C types of one size NumPy has both, and torch knows one.
    array = array.view(array.dtype.name)
    if any(step < 0 or step % array.itemsize for step in array.strides):
        array = np.array(array, order="C")
    if not array.flags.writeable:
        array = np.asarray(_Writable(array)) if array.size else np.array(array)
    return torch.from_numpy(array)


def pack_array(array: Any) -> tuple[Any, list[int], bytes] | None:
    """(dtype description, shape, bytes) for the skeleton; None for what `unpack_array` would refuse."""
    described = describe_dtype(array.dtype)
    if described is None or (not array.dtype.itemsize and array.size > _MAX_EMPTY):
        return None
    return described, list(array.shape), array.tobytes()


def describe_dtype(dtype: Any) -> Any:
    """JSON form of a dtype: its text, or a list of fields; None for what `parse_dtype` does not make it of.

    That is so of objects, fields out of order, and more of them than it takes.
    """
    from numpy.lib import format as npy

    def plain(value: Any) -> Any:
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    if dtype.hasobject:
        return None
    if dtype.isbuiltin == 1:
        return dtype.str
    try:
        described = plain(npy.dtype_to_descr(dtype))
        return described if parse_dtype(described) == dtype else None
    except ValueError:  # also of fields that overlap or are in another order than in memory
        return None


def parse_dtype(described: Any) -> Any:
    """The numpy dtype of `describe_dtype`'s result.

    Raises:
        ValueError: it is none, or one that holds Python objects.
    """
    from numpy.lib import format as npy

    checked = _check_descr(described, depth=0)
    try:
        dtype = npy.descr_to_dtype(checked)
    except Exception as exc:
        raise ValueError(f"{str(described)[:40]!r} is no numpy dtype") from exc
    if dtype.hasobject:
        raise ValueError(f"{str(described)[:40]!r} is no dtype of plain bytes")
    return dtype


def _check_descr(described: Any, *, depth: int) -> Any:
    if isinstance(described, str):
        if not _DTYPE_TEXT.match(described):
            raise ValueError(f"{described[:40]!r} is no numpy dtype")
        return described
    if not isinstance(described, list) or depth > 8 or len(described) > _MAX_FIELDS:
        raise ValueError("a numpy dtype must be text or a list of fields")
    if len(described) == 2 and not isinstance(described[0], list):
        return (_check_descr(described[0], depth=depth + 1), _check_shape(described[1]))
    return [_check_field(item, depth) for item in described]


def _check_field(item: Any, depth: int) -> tuple[Any, ...]:
    if not isinstance(item, list) or len(item) not in (2, 3):
        raise ValueError("a field of a numpy dtype must be [name, dtype] or [name, dtype, shape]")
    name = item[0]
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        name = tuple(name)
    elif not isinstance(name, str):
        raise ValueError("a field of a numpy dtype needs a name")
    rest = [_check_shape(shape) for shape in item[2:]]
    return (name, _check_descr(item[1], depth=depth + 1), *rest)


def _check_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = [shape]
    if not isinstance(shape, list) or len(shape) > 64:
        raise ValueError("a numpy shape must be a list of at most 64 sizes")
    if any(type(size) is not int or not 0 <= size < 2**62 for size in shape):
        raise ValueError(f"{str(shape)[:40]} is no shape")
    return tuple(shape)


def unpack_array(described: Any, shape: Any, data: bytes) -> Any:
    """The array of `pack_array`, over its own memory.

    Raises:
        ValueError: dtype, shape and bytes do not belong together.
    """
    import numpy as np

    dtype, shape = parse_dtype(described), _check_shape(shape)
    count = math.prod(shape)
    # Danger: items without bytes take memory all the same, and NumPy gives some of them bytes.
    if not dtype.itemsize and count > _MAX_EMPTY:
        raise ValueError(f"{count} items of no bytes")
    if count * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes cannot fill shape {shape} of {dtype}")
    if not data:
        return np.empty(shape, dtype)
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def unpack_scalar(described: Any, data: bytes) -> Any:
    """A numpy scalar from its dtype and bytes; raises ValueError as `unpack_array`."""
    # NumPy has a letter in the bytes of an empty text, and none in its dtype.
    return unpack_array(described, [], data if parse_dtype(described).itemsize else b"")[()]
