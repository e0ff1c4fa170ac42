"""SIGTERM as a request: finish what is in flight, let the loop save once more, and be gone in time.

The handler only sets a flag, which the training loop reads between steps (`Checkpointer.stop_requested`).
Since the signal no longer ends the process by itself, a timer makes sure that the grace period does: when
it is over the process ends with status 143 (128 + SIGTERM). Committed steps are safe either way.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from datetime import timedelta
from types import FrameType
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.types import parse_duration

_log = logging.getLogger("ckpt_core")


class SigtermGuard:
    """Installed while a Checkpointer is open. Made and closed on the main thread.

    Attributes:
        asked: whether SIGTERM has come.
    """

    def __init__(self, grace: timedelta | float) -> None:
        self._grace_s = parse_duration(grace, field="sigterm_grace").total_seconds()
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_sigterm='save' needs the main thread, where Python handles signals: "
                "make the Checkpointer there, or leave on_sigterm out"
            )
        self.asked = False
        self._wake = threading.Event()
        self._closed = threading.Event()
        # Started now: a signal handler may interrupt the threading module itself, so it starts none.
        self._thread = threading.Thread(target=self._watch, name="ckpt-sigterm", daemon=True)
        self._thread.start()
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Put the earlier handler back and end the timer. Idempotent."""
        self._closed.set()
        self._wake.set()
        on_main = threading.current_thread() is threading.main_thread()
        # Bound methods are equal, never identical.
        if on_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        self.asked = True
        self._wake.set()
        if callable(self._previous):
            self._previous(number, frame)

    def _watch(self) -> None:
        self._wake.wait()
        if not self._closed.wait(self._grace_s):
            _log.error("%.0f s after SIGTERM the process is still there: ending it", self._grace_s)
            os._exit(128 + signal.SIGTERM)
