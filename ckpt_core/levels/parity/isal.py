"""ISA-L, as the wheel of `pyeclib` brings it, called on the callers' own memory: nothing is copied."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TABLE_BYTES = 32


def is_there() -> bool:
    """Whether it is installed."""
    return _library() is not None


def combine(
    coefficients: Sequence[int], blocks: Sequence[NDArray[np.uint8]], into: NDArray[np.uint8]
) -> None:
    """As `codes.combine`."""
    library, k = _library(), len(blocks)
    assert library is not None and all(one.size == into.size for one in blocks)
    assert into.flags.c_contiguous and all(one.flags.c_contiguous for one in blocks)
    tables = _tables(tuple(coefficients))
    sources = (ctypes.c_void_p * k)(*(one.ctypes.data for one in blocks))
    targets = (ctypes.c_void_p * 1)(into.ctypes.data)
    library.ec_encode_data(into.size, k, 1, tables, sources, targets)


@cache
def _tables(coefficients: tuple[int, ...]) -> Any:
    library, k = _library(), len(coefficients)
    assert library is not None
    tables = ctypes.create_string_buffer(_TABLE_BYTES * k)
    library.ec_init_tables(k, 1, (ctypes.c_ubyte * k)(*coefficients), tables)
    return tables


@cache
def _library() -> ctypes.CDLL | None:
    try:
        files = importlib.metadata.files("pyeclib") or []
        path = next(one.locate() for one in files if one.name.startswith("libisal"))
        library = ctypes.CDLL(str(path))
        library.ec_encode_data.restype = library.ec_init_tables.restype = None
        library.ec_encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3
        library.ec_init_tables.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 2
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError, AttributeError):
        return None
    return library
