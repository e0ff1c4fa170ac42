"""The events of a run, appended to a file as they happen: one JSON line each.

    {"name": "opened", "time_s": 10.0, "unix_s": 1.7e9, "host": "a", "rank": 0, "options": {...}, ...}
    {"name": "barrier", "time_s": 11.5, "rank": 0, "waited_s": 0.0}
    {"name": "begin", "time_s": 11.7, "rank": 0, "waited_s": 0.0, "step": 120, ...}    the fields of `Event`

Each also has an "opening", drawn by its Checkpointer: several may write to one file, at a time or in turn.
"opened" comes once from each Checkpointer, "barrier" before each step of the optimizer that made the first
one, or without an optimizer at the end of each `wait_staged`: that is where iterations can be told apart.
`time_s` is the monotonic clock of the machine; `unix_s` in "opened" is the same moment for all machines.
`waited_s` is how long training has been inside the engine so far. All ranks may name the same file.

One thread writes, so that neither training nor a save waits for storage that hangs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import queue
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.observe.event import Event
from ckpt_core.observe.log import EventLog
from ckpt_core.system.threads import Worker

logger = logging.getLogger(__name__)

_MOST_LINES = 10_000
"""That wait to be written: with more, storage hangs."""
_END_S = 2.0


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
            PersistError: the system gives no more threads.
        """
        self._rank, self._waited_s = rank, waited_s
        self._opening = secrets.token_hex(4)
        try:
            # One write for each line: lines of several threads and ranks do not mix.
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            text = f"cannot be opened: {exc.strerror}; name another file, or none"
            raise ConfigError(
                f"events_file={os.fspath(path)!r} {text}", path=os.fspath(path)
            ) from exc
        self._pid = os.getpid()
        self._ended = False
        # In C: an interrupt of the training thread leaves no lock taken.
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._worker = Worker(self._run, name="ckpt-events")
        moment = {"time_s": time.monotonic(), "unix_s": time.time(), "host": platform.node()}
        # As opening does, this waits for storage, before training.
        before = "\n" if _is_cut(self._fd, path) else ""
        self._write(self._full({"name": "opened"} | moment | dict(opened)), before=before)
        try:
            self._worker.start()
        except BaseException:
            os.close(self._fd)
            raise
        self._unsubscribe: Callable[[], None] = log.subscribe(self._event)

    def barrier(self) -> None:
        """Training passed a barrier."""
        self._tell({"name": "barrier", "time_s": time.monotonic()})

    def close(self) -> None:
        """Have written what was told, unless storage hangs, and write no more. Idempotent."""
        self._unsubscribe()
        self._ended = True
        self._lines.put(None)
        if not self._worker.join(deadline=time.monotonic() + _END_S):
            logger.warning("the last events are left to a thread that hangs")

    def _event(self, event: Event) -> None:
        self._tell(dataclasses.asdict(event))

    def _tell(self, line: dict[str, Any]) -> None:
        # The thread stays behind in a fork.
        if self._ended or os.getpid() != self._pid:
            return
        if self._lines.qsize() >= _MOST_LINES:
            self._give_up(f"{_MOST_LINES} lines wait for storage that hangs")
            return
        self._lines.put(self._full(line))

    def _full(self, line: dict[str, Any]) -> dict[str, Any]:
        about = {"rank": self._rank, "opening": self._opening, "waited_s": self._waited_s()}
        return line | about

    def _give_up(self, why: object) -> None:
        self._ended = True
        logger.warning("events are not written down any more: %s", why)

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None and self._write(line):
                pass
        finally:
            os.close(self._fd)

    def _write(self, line: dict[str, Any], *, before: str = "") -> bool:
        left = (before + json.dumps(line, default=str) + "\n").encode()
        try:
            # A disk that has become full takes a part, and says why when it is to take the rest.
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as exc:
            self._give_up(exc)
            return False
        return True


def _is_cut(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether the last line has no end, as a full disk leaves it: the next one would be lost with it."""
    if not os.fstat(fd).st_size:
        return False
    # Who may not read it appends as ever.
    with suppress(OSError), open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


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
