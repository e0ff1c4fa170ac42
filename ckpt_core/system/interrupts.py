"""Ctrl-C at any instant of a run that owns processes and folders: none is left, since none comes unknown.
SIGTERM is the same to a command of ours, which says so by `terminated_as_by_ctrl_c`.

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


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it comes as Ctrl-C does."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def terminated_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, where nobody handles it yet, is raised as `Terminated` meanwhile. On the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        signal.signal(signal.SIGTERM, _terminate)
        yield
    finally:
        # Whoever has put another one there, such as an agent, goes on to need it while the process ends.
        if signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, before)


def stopped_by_signals() -> threading.Event:
    """Set by SIGTERM and SIGINT, from now on for the life of the process. Called on the main thread."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


class Held:
    """What has been noted. Made by `holding`."""

    def __init__(self) -> None:
        self._noted = 0
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
        self._noted = number
        if self._allowed:
            self._raise()

    def settle(self) -> None:
        """Let it come now, to whoever is next to handle it."""
        if self._noted:
            signal.raise_signal(self._noted)

    def _raise(self) -> None:
        number = self._noted
        # Order matters: from here on nothing disturbs those who clean up.
        self._allowed, self._noted = False, 0
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def holding() -> Iterator[Held]:
    """Note Ctrl-C instead of raising it; nests. Without effect where it is ignored, or on another thread."""
    held, before = Held(), _raising()
    if threading.current_thread() is not threading.main_thread():
        before = {}

    def back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        try:
            for number in before:
                signal.signal(number, held.note)
            yield held
        finally:
            back()
    finally:
        back()  # the first may have been cut short between the two
        held.settle()


def _raising() -> dict[signal.Signals, Callable[[int, FrameType | None], object]]:
    """The handlers that may raise: what somebody else makes of SIGTERM is not ours to put off."""
    ctrl_c, term = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    found: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
    if callable(term) and (term is _terminate or isinstance(getattr(term, "__self__", None), Held)):
        found[signal.SIGTERM] = term
    if callable(ctrl_c):
        found[signal.SIGINT] = ctrl_c
    return found


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
