"""How far many bytes are: a bar on a terminal, a line now and then elsewhere, nothing for what is short."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.text import console, note
from ckpt_core.units import size_text

if TYPE_CHECKING:
    from rich.progress import Progress

Show = Callable[[str, int, int], None]
"""Told a label, bytes done and bytes in all; by one thread or several."""

_SHORT_S = 1.0
_LINES_S = 5.0


@contextmanager
def progress_bar(*, shown: bool = True) -> Iterator[Show]:
    """A function that tells how far we are, beside the answer; it does nothing if not `shown`."""
    made = _Progress(shown)
    try:
        yield made.show
    finally:
        made.end()


class _Progress:
    """A bar that comes a second after the first word, or a line every few seconds from there."""

    def __init__(self, shown: bool) -> None:
        self._wait_s = _SHORT_S if _on_terminal() else _LINES_S
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
        with self._lock:
            if self._next_s == 0.0:
                self._next_s = now_s + self._wait_s
            if now_s < self._next_s:
                return
            if _on_terminal():
                self._draw(label, done, total)
                return
            self._next_s = now_s + self._wait_s
            note(f"{label}: {size_text(done)} of {size_text(total)}")

    def end(self) -> None:
        """Take the bar away; nothing is shown after it."""
        self._next_s = float("inf")
        with self._lock:
            if self._bar is not None:
                self._bar.stop()

    def _draw(self, label: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _new_bar()
        if label not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)
            self._tasks[label] = self._bar.add_task(label)
        self._bar.update(self._tasks[label], completed=done, total=total)


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _new_bar() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    bar.start()
    return bar
