"""How far many bytes are: a bar on a terminal, a line now and then elsewhere, nothing for what is short.

Idea: whoever works calls in between; no thread, no hook into what others print, and nothing to put back when
the process is killed. What cannot be shown is not: it ends no work, and keeps none waiting.
"""

from __future__ import annotations

import logging
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ckpt_core.units import clean, size_text

if TYPE_CHECKING:
    from rich.progress import Progress

Show = Callable[[str, int, int], None]
"""Told a label, bytes done and bytes in all; by one thread or several. Never raises."""

logger = logging.getLogger("ckpt_core")

_SHORT_S = 1.0
_LINES_S = 5.0
_DRAWN_S = 0.1


def _to_log(text: str) -> None:
    logger.info("%s", text)


@contextmanager
def progress_bar(*, shown: bool = True, tell: Callable[[str], object] = _to_log) -> Iterator[Show]:
    """A function that tells how far we are, on standard error; it does nothing if not `shown`.

    Args:
        tell: takes the lines where standard error is no terminal.
    """
    made = _Progress(shown, tell)
    try:
        yield made.show
    finally:
        made.end()


class _Progress:
    """A bar that comes a second after the first word, or a line every few seconds from there."""

    def __init__(self, shown: bool, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._wait_s = _SHORT_S if _terminal() is not None else _LINES_S
        # From the first word on: what is imported before it tells nothing of how far we are.
        self._next_s = 0.0 if shown else float("inf")
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def show(self, label: str, done: int, total: int) -> None:
        """See `Show`."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            if self._next_s == 0.0:
                self._next_s = now_s + self._wait_s
            if now_s >= self._next_s:
                self._say(label, done, total)
        except Exception:  # a terminal that is gone, say: nobody is there to be told
            self._next_s = float("inf")
        finally:
            self._lock.release()

    def end(self) -> None:
        """Take the bar away; nothing is shown after it."""
        # It is not given back: whoever comes later says nothing. An interrupt may have left it taken.
        terminal, held = _terminal(), self._lock.acquire(timeout=_SHORT_S)
        self._next_s = float("inf")
        with suppress(Exception):
            if held and self._bar is not None and terminal is not None and _takes(terminal):
                self._erase(self._bar)

    def _say(self, label: str, done: int, total: int) -> None:
        terminal = _terminal()
        if terminal is None:
            self._next_s = time.monotonic() + self._wait_s
            self._tell(f"{label}: {size_text(done)} of {size_text(total)}")
        elif _takes(terminal):
            self._next_s = time.monotonic() + _DRAWN_S
            self._draw(label, done, total)

    def _draw(self, label: str, done: int, total: int) -> None:
        from rich.segment import Segments

        if self._bar is None:
            self._bar = _new_bar()
        if label not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)
            self._tasks[label] = self._bar.add_task(clean(label))
        self._bar.update(self._tasks[label], completed=done, total=total)
        out = self._bar.console
        # The cursor stays in front of it: what others print comes over the bar, and not behind it.
        out.print(Segments(out.render_lines(self._bar.get_renderable())[0]), end="\r")

    def _erase(self, bar: Progress) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        bar.console.control(Control((ControlType.ERASE_IN_LINE, 2)))


def _terminal() -> int | None:
    """The descriptor of standard error where that is a terminal."""
    try:
        return sys.stderr.fileno() if sys.stderr.isatty() else None
    except (AttributeError, OSError, ValueError):  # None, closed, or something else in its place
        return None


def _takes(terminal: int) -> bool:
    """Whether it takes a line now: one that was stopped (Ctrl-S) would keep us waiting for ever."""
    asked = select.poll()
    asked.register(terminal, select.POLLOUT)
    return bool(asked.poll(0))


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True, markup=False, emoji=False))
