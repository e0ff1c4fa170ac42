"""Ctrl-C at any instant of a run that owns processes and folders: none is left, since none comes unknown.

with holding() as held:          # from here on Ctrl-C is only noted
    folder = mkdtemp()
    try:
        with held.allowed():     # and comes here alone, once
            ...
    finally:
        remove(folder)           # undisturbed
                                 # what was noted comes at the end
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class Held:
    """What has been noted. Made by `holding`."""

    def __init__(self) -> None:
        self._noted = False
        self._allowed = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let Ctrl-C through, also one that was noted; the first to come closes the door again."""
        try:
            self._allowed = True
            if self._noted:
                self._raise()
            yield
        finally:
            self._allowed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self._noted = True
        if self._allowed:
            self._raise()

    def settle(self) -> None:
        """Let it come now, to whoever is next to handle it."""
        if self._noted:
            signal.raise_signal(signal.SIGINT)

    def _raise(self) -> None:
        # Order matters: from here on nothing disturbs those who clean up.
        self._allowed = self._noted = False
        raise KeyboardInterrupt


@contextmanager
def holding() -> Iterator[Held]:
    """Note Ctrl-C instead of raising it; nests. Without effect where it is ignored, or on another thread."""
    held, before = Held(), signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield held
        return
    try:
        signal.signal(signal.SIGINT, held.note)
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        held.settle()


def putting_back(call: Callable[[], T], back: Callable[[], object]) -> T:
    """What `call` returns; `back()` is done when this ends, also by a second interrupt while it leaves.

    No context manager: what cuts its end short puts that off for as long as somebody holds the traceback.

    Args:
        back: is called twice, and may be cut short in the first of them.
    """
    try:
        try:
            return call()
        finally:
            back()
    finally:
        back()
