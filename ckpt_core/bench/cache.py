"""Warm and cold page cache for the files of one contender, set from outside its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_READ_BYTES = 2**20


def warm(folder: Path) -> None:
    """Read every file below `folder` through the page cache."""
    for fd in _open_all(folder):
        while os.read(fd, _READ_BYTES):
            pass


def drop(folder: Path) -> None:
    """Ask the kernel to forget the cached pages of every file below `folder`.

    A page that is dirty or mapped stays; whether it worked is seen in what the next read takes
    from storage (`proc.io_bytes`).
    """
    for fd in _open_all(folder):
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _open_all(folder: Path) -> Iterator[int]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with _opened(path) as fd:
                yield fd


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
