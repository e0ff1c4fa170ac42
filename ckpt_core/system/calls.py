"""Calls of Linux that Python has no names for; `Files` alone comes here."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_STATFS_BYTES = 512  # more than any architecture has


def filesystem_kind(fd: int) -> int:
    """The kind of filesystem that a file is on; 0 when it cannot be told."""
    function = _load("fstatfs")
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if function is None or function(fd, found) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(found).value  # f_type comes first


def exchange(first: Path, second: Path) -> None:
    """Swap two existing names atomically. Raises OSError."""
    function = _load("renameat2")
    if function is None:
        raise OSError(errno.ENOSYS, "renameat2 is not in this libc", str(first))
    names = os.fsencode(first), os.fsencode(second)
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))


def fallocate(fd: int, size: int) -> None:
    """Reserve blocks for bytes 0..size. Raises OSError."""
    if _fallocate is None:
        raise OSError(errno.ENOSYS, "fallocate is not in this libc")
    while _fallocate(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask for cached pages to be written out: a hint."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


@cache
def _load(name: str, *types: type[ctypes._SimpleCData[int]]) -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None and types:
        function.argtypes = types
    return function


_sync_file_range = _load(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_fallocate = _load("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
