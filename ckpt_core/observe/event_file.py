"""The events of a run, appended to a file as they happen: one JSON line each.

    {"name": "opened", "time_s": 10.0, "rank": 0, "world_size": 1, "options": {"in_flight": 2, ...}}
    {"name": "barrier", "time_s": 11.5, "rank": 0}
    {"name": "begin", "time_s": 11.7, "rank": 0, "step": 120, ...}        the fields of `Event`

"opened" comes once from each Checkpointer, "barrier" before each step of the optimizer that made the first
one, or without an optimizer at the end of each `wait_staged`: that is where iterations can be told apart.
All ranks may name the same file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.observe.event import Event
from ckpt_core.observe.log import EventLog

logger = logging.getLogger(__name__)


class NoEventFile:
    """Nothing is written."""

    def barrier(self) -> None:
        """Training passed a barrier."""

    def close(self) -> None:
        """Write no more. Idempotent."""


class EventFile(NoEventFile):
    """Subscribes to a log and writes down what it tells, from whichever thread; never raises in them."""

    def __init__(
        self, path: str | os.PathLike[str], log: EventLog, *, rank: int, opened: Mapping[str, Any]
    ) -> None:
        """Append to `path`, beginning with the line "opened".

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._rank = rank
        try:
            # One write for each line: lines of several threads and ranks do not mix.
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            text = f"cannot be opened: {exc.strerror}; name another file, or none"
            raise ConfigError(
                f"events_file={os.fspath(path)!r} {text}", path=os.fspath(path)
            ) from exc
        self._failed = False
        self._mutex = threading.Lock()
        self._write({"name": "opened", "time_s": time.monotonic()} | dict(opened))
        self._unsubscribe: Callable[[], None] = log.subscribe(self._event)

    def barrier(self) -> None:
        """Training passed a barrier."""
        self._write({"name": "barrier", "time_s": time.monotonic()})

    def close(self) -> None:
        """Write no more. Idempotent."""
        self._unsubscribe()
        with self._mutex:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _event(self, event: Event) -> None:
        self._write(dataclasses.asdict(event))

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line | {"rank": self._rank}, default=str) + "\n"
        with self._mutex:
            if self._failed or self._fd < 0:
                return
            try:
                os.write(self._fd, text.encode())
            except OSError as exc:
                self._failed = True
                logger.warning("events are not written down any more: %s", exc)


def event_file(
    path: str | os.PathLike[str] | None, log: EventLog, *, rank: int, opened: Mapping[str, Any]
) -> NoEventFile:
    """Write the events of `log` to `path`; nothing where it is None."""
    return NoEventFile() if path is None else EventFile(path, log, rank=rank, opened=opened)
