"""The operating system refuses one call of ours: below `Files`, and where nothing goes through it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckpt_core.system import files

CODES = (
    errno.EMFILE,
    errno.EACCES,
    errno.ENOMEM,
    errno.EIO,
    errno.ENFILE,
    errno.ESTALE,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
_OURS = f"{os.sep}ckpt_core{os.sep}"
_DOORS: tuple[tuple[ModuleType | type, tuple[str, ...]], ...] = (
    (
        os,
        tuple(
            "stat lstat open scandir mkdir rmdir unlink rename link fsync fdatasync ftruncate pwrite preadv"
            " pread statvfs posix_fallocate fstat".split()
        ),
    ),
    (files, ("fallocate",)),
    (fcntl, ("lockf",)),
    (mmap, ("mmap",)),
)


class Refusal:
    """The n-th call (counted from 0) that code of ours makes fails; `struck` says which one it was."""

    def __init__(self, n: int, code: int) -> None:
        self._n = n
        self._code = code
        self._count = 0
        self._lock = threading.Lock()
        self.struck: str | None = None

    def due(self, name: str) -> bool:
        with self._lock:
            self._count += 1
            if self._count - 1 != self._n:
                return False
            self.struck = f"{name} from {_caller()}"
            return True

    def call(self, name: str, real: Callable[..., Any], args: Any, options: Any) -> Any:
        if _is_ours() and self.due(name):
            shown = args[0] if args and isinstance(args[0], str | Path) else None
            raise OSError(self._code, os.strerror(self._code), shown and str(shown))
        return real(*args, **options)

    def start(self, real: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
        if _is_ours() and self.due("start"):
            raise RuntimeError("can't start new thread")
        real(thread)


@contextmanager
def refusing(refusal: Refusal) -> Iterator[None]:
    """All calls of the process go by the refusal meanwhile."""

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: refusal.call(name, real, args, options)

    started = threading.Thread.start
    with pytest.MonkeyPatch.context() as patch:
        for module, names in _DOORS:
            for name in names:
                patch.setattr(module, name, wrap(name, getattr(module, name)))
        patch.setattr(threading.Thread, "start", lambda thread: refusal.start(started, thread))
        yield


def _frames() -> Iterator[Any]:
    frame = sys._getframe(3)
    for _ in range(7):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_ours() -> bool:
    """Whether code of ours has made the call, by way of the standard library perhaps."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if _OURS in name:
            return True
        if "importlib" in name or "torch" in name:
            return False
    return False


def _caller() -> str:
    frames = [frame for frame in _frames() if _OURS in frame.f_code.co_filename]
    return ", ".join(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames[:2])
