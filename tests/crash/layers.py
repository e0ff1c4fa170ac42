"""File layers that kill the process at one operation; the real engine runs above them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.system.files import Buffer, Files
from tests.crash.promises import QuickFiles

NAME_CHANGES = ("mkdir", "rmdir", "unlink", "rename", "exchange", "link")
SYNCS = ("sync_dir", "sync")
OPENS = ("create", "open_write", "map_shared", "close")
CONTENTS = ("allocate", "truncate", "pwrite", "write_mapped")
CHANGES = (*NAME_CHANGES, *SYNCS, *OPENS, *CONTENTS)
"""Every operation of `Files` that a save does, reads aside."""

Hook = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]
"""Called with the name of an operation, its arguments, and what does it."""


def hooked(base: type[Files], hook: Hook, names: tuple[str, ...] = CHANGES) -> Files:
    """Files of class `base` whose operations `names` go through `hook`."""

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(base, name)

        def operation(self: Files, *args: Any, **options: Any) -> Any:
            return hook(name, args, lambda: real(self, *args, **options))

        return operation

    layer = type("Hooked", (base,), {name: wrap(name) for name in names})
    made: Files = layer()
    return made


class NoExchange(QuickFiles):
    """A filesystem that cannot swap two names."""

    def exchange(self, first: Path, second: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class NoLinks(QuickFiles):
    """A filesystem that gives no file a second name."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class KillAt:
    """Kills this process at the n-th operation (counted from 0) of the given names.

    `point` says where: "before" the operation, "after" it, or "torn": a write that is cut in the middle.
    `count` is how many have begun.
    """

    def __init__(self, n: int, *, point: str = "before", names: tuple[str, ...] = CHANGES) -> None:
        self._n = n
        self._point = point
        self._names = names
        self.count = 0
        self._lock = threading.Lock()
        self.armed = True

    def files(self, base: type[Files] = QuickFiles) -> Files:
        """Files of class `base` that die here."""
        return hooked(base, self)

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if not self._is_due(name):
            return act()
        if self._point == "torn":
            fd, data, offset = args
            _write_part(fd, data, offset)
        elif self._point == "after":
            with contextlib.suppress(OSError):  # an operation that fails is a place to die as well
                act()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def _is_due(self, name: str) -> bool:
        if not self.armed or name not in self._names:
            return False
        with self._lock:
            self.count += 1
            return self.count == self._n + 1


def _write_part(fd: int, data: Buffer, offset: int) -> None:
    view = memoryview(data).cast("B")
    # A descriptor with O_DIRECT takes whole blocks only.
    part = len(view) // 2 // 512 * 512 or len(view) // 2
    try:
        os.pwrite(fd, view[:part], offset)
    except OSError:
        os.pwrite(fd, view[: len(view) // 2 // 4096 * 4096], offset)
