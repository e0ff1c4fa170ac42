"""Something that may block on storage for ever, done by a thread that may be left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ckpt_core.levels.errands import Progress
from ckpt_core.levels.far.door import Away
from ckpt_core.system.threads import Worker

_Result = TypeVar("_Result")

_END_S = 5.0
_BEAT_S = 20.0


class _Stopped(Exception):
    """Nobody waits any more. Never leaves this module."""


class _Task:
    """What the thread and whoever waits for it know of one another."""

    def __init__(self, action: Callable[[Progress], object]) -> None:
        self._action = action
        self._stopped = False
        self.heard = time.monotonic()
        self.results: list[object] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """On the thread."""
        try:
            self.results.append(self._action(self.tell))
        except BaseException as exc:  # raised again by whoever waits
            self.errors.append(exc)

    def tell(self, done: int, total: int) -> None:
        """As a `Progress`."""
        self.heard = time.monotonic()
        if self._stopped:
            raise _Stopped

    def stop(self) -> None:
        """The next word raises."""
        self._stopped = True


def run_here(
    action: Callable[[Progress], _Result],
    *,
    timeout_s: float,
    beat: Callable[[], None] | None = None,
) -> _Result:
    """What `action` returns or raises, on a thread of this process.

    An interrupt ends it, within seconds, at its next word.

    Args:
        timeout_s: longest time without a word from it.
        beat: called on the calling thread now and then while it goes on.

    Raises:
        Away: that has passed; the thread is left behind.
        PersistError: no thread is to be had.
    """
    task = _Task(action)
    worker = Worker(task.run, name="ckpt-bring")
    try:
        worker.start()
        most_s = timeout_s if beat is None else _BEAT_S
        while not worker.join(deadline=min(task.heard + timeout_s, time.monotonic() + most_s)):
            if beat is not None:
                beat()
            if time.monotonic() >= task.heard + timeout_s:
                task.stop()
                raise Away(f"the storage has not answered for {timeout_s:g} s: it was given up")
    except BaseException:
        task.stop()
        worker.join(deadline=time.monotonic() + min(_END_S, timeout_s))
        raise
    if task.errors:
        raise task.errors[0]
    return task.results[0]  # type: ignore[return-value]
