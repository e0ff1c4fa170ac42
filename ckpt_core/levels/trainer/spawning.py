"""The agent of a root, as the process that trains sees it: started, looked after, left alone at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_core.errors import PersistError
from ckpt_core.levels.errands import Home, child
from ckpt_core.levels.mailbox import AGENT_LOG, LEVELS
from ckpt_core.store import writer_of

_log = logging.getLogger("ckpt_core")

_LOOK_S = 1.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_WELL_S = 120.0
"""An agent that has lived so long did not die of its start."""


class Agent:
    """One for each root, whoever started it. Used by one thread.

    Args:
        root: it works for this one.
        clock: monotonic.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._home = Home()
        self._clock = clock
        self._pid: int | None = None
        self._started_s = self._looked_s = -_LOOK_S
        self._pause_s = _FIRST_PAUSE_S
        self._deaths = self._status = 0
        self._warned = False

    def start(self) -> None:
        """Start one; where there is one already, it ends by itself, and the other one goes by the new plan.

        Raises:
            PersistError: the system gives no more processes, or the log cannot be written.
        """
        arguments, environ = child("agent", str(self._root))
        try:
            log = os.open(
                self._root / LEVELS / AGENT_LOG,
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
                0o644,
            )
            try:
                process = subprocess.Popen(
                    arguments,
                    env=environ,
                    cwd=self._home.path(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # it outlives this process, and hears no Ctrl-C
                )
            finally:
                os.close(log)
        except OSError as exc:
            raise PersistError(
                f"the agent of {self._root} could not be started: {exc.strerror}. Committed steps are safe",
                path=self._root,
            ) from exc
        self._pid = process.pid
        self._started_s = self._clock()
        # It is waited for by its number: nobody holds the object for as long as the agent may live.
        process.returncode = 0

    def kill(self) -> None:
        """End the one that was started here, at once, and what it has started. Idempotent."""
        pid = self._pid
        if pid is None or self._has_ended():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._pid = None

    def look(self) -> str:
        """Start another one if there is none; what is wrong, for people, "" when one is there.

        Called again and again; looks about once a second. Never raises.
        """
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return self._problem()
        self._looked_s = now
        if not self._has_ended():
            if now - self._started_s > _WELL_S:
                self._deaths, self._pause_s = 0, _FIRST_PAUSE_S
            return self._problem()
        if writer_of(self._root / LEVELS) is not None:
            self._deaths = 0
            return ""
        if now - self._started_s >= self._pause_s:
            self._start_again()
        return self._problem()

    # -- inside ----------------------------------------------------------------------------------

    def _start_again(self) -> None:
        self._deaths += 1
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        why = f"ended with status {self._status}" if self._status else ""
        try:
            self.start()
        except PersistError as exc:
            self._started_s = self._clock()
            why = str(exc)
        # Of status 0, one that another one had come before: nothing to speak of.
        if why and not self._warned:
            self._warned = True
            text = "the agent of %s is started anew, now and whenever it ends: %s; see %s"
            _log.warning(text, self._root, why, self._root / LEVELS / AGENT_LOG)

    def _problem(self) -> str:
        if self._deaths < 2:
            return ""
        return f"its agent has ended {self._deaths} times: see {self._root / LEVELS / AGENT_LOG}"

    def _has_ended(self) -> bool:
        if self._pid is None:
            return True
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else 0
        except ChildProcessError:
            pid = self._pid  # somebody who waits for all children has it
        if pid == self._pid:
            self._pid = None
        return self._pid is None
