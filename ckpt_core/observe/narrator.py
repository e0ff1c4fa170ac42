"""What a run says of itself in the log: committed steps, restores that last, and one line at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_core.observe.event import Event, EventName
from ckpt_core.observe.log import EventLog
from ckpt_core.system.threads import own_lock
from ckpt_core.units import count_text, size_text, time_text

logger = logging.getLogger("ckpt_core")

_LONG_S = 1.0
"""A restore that took less is not told: who asked for it has not waited."""


class Narrator:
    """Tells the log of ckpt_core what became of each save, at INFO on the first rank, else at DEBUG.

    Each line says how long training has waited since the one before.

    Args:
        root: where steps are saved.
        log: the events of the run.
        rank: of this process.
        waited_s: how long the training thread has been inside the engine so far.
    """

    def __init__(
        self, root: Path, log: EventLog, *, rank: int, waited_s: Callable[[], float]
    ) -> None:
        self._root, self._waited_s = root, waited_s
        self._level = logging.DEBUG if rank else logging.INFO
        self._mutex = own_lock()
        self._began = time.monotonic()
        self._told_s = 0.0
        self._saves = self._failures = self._nbytes = 0
        self._newest: int | None = None
        # No others: they are told on the training thread, at each step.
        told = (EventName.COMMITTED, EventName.FAILED, EventName.RESTORED)
        self._unsubscribe = log.subscribe(self._event, only=told)

    def close(self) -> None:
        """Say what the run was, if it saved or tried to, and no more from here. Idempotent."""
        self._unsubscribe()
        with self._mutex:
            text, self._saves, self._failures = self._summary(), 0, 0
        if text:
            logger.log(self._level, "%s", text)

    def _event(self, event: Event) -> None:
        if event.name == EventName.RESTORED:
            if event.seconds >= _LONG_S:
                text = "step %d is restored from %s in %s"
                logger.log(self._level, text, event.step, self._root, time_text(event.seconds))
            return
        with self._mutex:
            if event.name == EventName.FAILED:
                self._failures += 1
                return
            self._saves += 1
            self._nbytes += event.nbytes
            self._newest = event.step
            waited_s = self._waited_s()
            lately_s, self._told_s = waited_s - self._told_s, waited_s
        logger.log(
            self._level,
            "step %d is saved: %s in %s, %s/s, in %s; training waited %s",
            event.step,
            size_text(event.nbytes),
            time_text(event.seconds),
            size_text(event.nbytes / max(event.seconds, 1e-9)),
            self._root,
            time_text(lately_s),
        )

    def _summary(self) -> str:
        if not self._saves and not self._failures:
            return ""
        waited_s, lasted_s = self._waited_s(), time.monotonic() - self._began
        newest = "" if self._newest is None else f", the newest is {self._newest}"
        text = (
            f"{count_text(self._saves, 'step')} saved{newest}, in {self._root}; "
            f"{size_text(self._nbytes)} in all; "
            f"training waited {time_text(waited_s)} of {time_text(lasted_s)}"
        )
        return text + (f"; {self._failures} failed" if self._failures else "")
