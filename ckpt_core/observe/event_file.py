"""The events of a run, appended to a file as they happen: one JSON line each.

    {"name": "opened", "time_s": 10.0, "unix_s": 1.7e9, "host": "a", "rank": 0, "options": {...}, ...}
    {"name": "barrier", "time_s": 11.5, "rank": 0, "waited_s": 0.0}
    {"name": "begin", "time_s": 11.7, "rank": 0, "waited_s": 0.0, "step": 120, ...}    the fields of `Event`

"opened" comes once from each Checkpointer, "barrier" before each step of the optimizer that made the first
one, or without an optimizer at the end of each `wait_staged`: that is where iterations can be told apart.
`time_s` is the monotonic clock of the machine; `unix_s` in "opened" is the same moment for all machines.
`waited_s` is how long training has been inside the engine so far. All ranks may name the same file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
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
        self,
        path: str | os.PathLike[str],
        log: EventLog,
        *,
        rank: int,
        opened: Mapping[str, Any],
        waited_s: Callable[[], float],
    ) -> None:
        """Append to `path`, beginning with the line "opened".

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._rank, self._waited_s = rank, waited_s
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
        moment = {"time_s": time.monotonic(), "unix_s": time.time(), "host": platform.node()}
        self._write({"name": "opened"} | moment | dict(opened))
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
        line = line | {"rank": self._rank, "waited_s": self._waited_s()}
        text = json.dumps(line, default=str) + "\n"
        with self._mutex:
            if self._failed or self._fd < 0:
                return
            try:
                os.write(self._fd, text.encode())
            except OSError as exc:
                self._failed = True
                logger.warning("events are not written down any more: %s", exc)


def event_file(
    path: str | os.PathLike[str] | None,
    log: EventLog,
    *,
    rank: int,
    opened: Mapping[str, Any],
    waited_s: Callable[[], float] = lambda: 0.0,
) -> NoEventFile:
    """Write the events of `log` to `path`; nothing where it is None."""
    if path is None:
        return NoEventFile()
    return EventFile(path, log, rank=rank, opened=opened, waited_s=waited_s)
