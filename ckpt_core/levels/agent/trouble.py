"""What keeps a level from being up to date: told once, and tried again ever less often."""

from __future__ import annotations

import logging
import threading
import time

from ckpt_core.errors import CkptError
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.pace import Backoff

logger = logging.getLogger(__name__)


class Trouble:
    """That of one level, for its thread.

    It is that of one plan: before the next one somebody may have seen to it, which is then tried at once.
    """

    def __init__(self, url: str, board: Board, timing: Timing) -> None:
        self._url, self._board = url, board
        self._backoff = Backoff(first_s=timing.again_s, most_s=timing.again_most_s)
        self._token: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether there is any, with the present plan."""
        return self._token == self._board.plan.token

    def failed(self, exc: Exception, token: str) -> float:
        """A turn ended with an error; how many seconds to wait before the next one.

        Args:
            token: of the plan when the turn began.
        """
        # What this machine lacks comes back by itself.
        lacks = _lacks(exc)
        hopeless = getattr(exc, "hopeless", not isinstance(exc, CkptError) and not lacks)
        text = str(exc) or type(exc).__name__
        if lacks or not isinstance(exc, CkptError):
            text = f"{self._url}: {lacks or text}"
        self.tell(text, token, hopeless=hopeless)
        return self._backoff.failed(hopeless=hopeless)

    def tell(self, text: str, token: str, *, hopeless: bool) -> None:
        """It is in the status, and in the log where it is new.

        Args:
            token: as for `failed`; where there is a later plan by now the status says nothing of it.
            hopeless: somebody has to do something.
        """
        is_new = token != self._token
        with self._board.change(self._url) as status:
            if token == self._board.plan.token:
                if is_new:
                    status.since_s = time.time()
                status.problem, status.hopeless = text, hopeless
        if is_new:
            self._backoff.succeeded()
            logger.warning("%s", text)
        self._token = token

    def pause(
        self, pause_s: float, token: str, *, woken: threading.Event, stop: threading.Event
    ) -> None:
        """Wait before the next turn, whatever is committed meanwhile; no longer than to the next plan.

        Args:
            token: as for `failed`.
            woken: set where there may be another plan; cleared here.
        """
        until_s = time.monotonic() + pause_s
        while not stop.is_set() and self._board.plan.token == token:
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            woken.wait(left_s)
            woken.clear()

    def end(self) -> None:
        """A turn ended well."""
        if not self.is_there:
            return
        logger.info("%s: well again after %d failures", self._url, self._backoff.failures)
        self._token = None
        with self._board.change(self._url) as status:
            status.problem, status.hopeless, status.since_s = "", False, 0.0


def _lacks(exc: Exception) -> str:
    """What the agent has too little of, and what to do; "" where it is nothing that comes back by itself."""
    if isinstance(exc, MemoryError):
        return "no memory is left for the agent: end what uses it, or give this job more"
    if isinstance(exc, RuntimeError) and "start new thread" in str(exc):
        return "no threads are left for the agent: raise `ulimit -u`, or the limit of the unit"
    return ""
