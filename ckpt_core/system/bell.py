"""`Bell`: a thread waits until another one rings, a name appears in a directory, or its time is over."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from ckpt_core.system.threads import own_lock

_IN_MOVED_TO = 0x80
_IN_ONLYDIR = 0x01000000
"""linux/inotify.h, both."""
_EVENTS_BYTES = 1 << 16
_libc = ctypes.CDLL(None)


class Bell:
    """One thread waits, any may ring. Has descriptors from construction to `close`.

    Names that other machines give on a shared filesystem ring nothing, and no name does where this user has
    as many bells as the system allows (128 by default): the time of `wait` is to be one that will do then.
    """

    def __init__(self) -> None:
        self._lock = own_lock()
        self._rung = self._named = -1
        with contextlib.suppress(OSError):
            self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # The same two flags, by its other name; -1 where there are no more.
            self._named = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._both = [fd for fd in (self._rung, self._named) if fd >= 0]
        self._poll = select.poll()
        for fd in self._both:
            self._poll.register(fd, select.POLLIN)

    def ring(self) -> None:
        """Wake who waits, or who waits next. Does nothing once it is closed."""
        with self._lock, contextlib.suppress(OSError):
            if self._both:
                os.eventfd_write(self._rung, 1)

    def wait(self, timeout_s: float, *, folders: Iterable[Path] = ()) -> None:
        """Return when somebody rings, when something is renamed to a name in a folder, or at the end.

        What has happened since the last wait on the same folders counts, too. Not called once it is closed.
        """
        for folder in folders if self._named >= 0 else ():
            # Each time, for another directory may have the name; of one that is known it changes nothing.
            _libc.inotify_add_watch(self._named, os.fsencode(folder), _IN_MOVED_TO | _IN_ONLYDIR)
        self._poll.poll(timeout_s * 1000)
        for fd in self._both:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, _EVENTS_BYTES)

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        with self._lock:
            both, self._both = self._both, []
            for fd in both:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
