"""What keeps a level from being up to date: told once, and tried again ever less often."""

from __future__ import annotations

import logging
import time

from ckpt_core.errors import CkptError
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.pace import Backoff

logger = logging.getLogger(__name__)


class Trouble:
    """That of one level, for its thread.

    Attributes:
        is_there: whether there is any.
    """

    def __init__(self, url: str, board: Board, timing: Timing) -> None:
        self.is_there = False
        self._url, self._board = url, board
        self._backoff = Backoff(first_s=timing.again_s, most_s=timing.again_most_s)

    def failed(self, exc: Exception) -> float:
        """A turn ended with an error; how many seconds to wait before the next one."""
        hopeless = getattr(exc, "hopeless", not isinstance(exc, CkptError))
        self.tell(str(exc), hopeless=hopeless)
        return self._backoff.failed(hopeless=hopeless)

    def tell(self, text: str, *, hopeless: bool) -> None:
        """It is in the status, and in the log where it is new; hopeless: somebody has to do something."""
        with self._board.change(self._url) as status:
            if not self.is_there:
                status.since_s = time.time()
            status.problem, status.hopeless = text, hopeless
        if not self.is_there:
            logger.warning("%s", text)
        self.is_there = True

    def end(self) -> None:
        """A turn ended well."""
        if not self.is_there:
            return
        logger.info("%s: well again after %d failures", self._url, self._backoff.failures)
        self._backoff.succeeded()
        self.is_there = False
        with self._board.change(self._url) as status:
            status.problem, status.hopeless, status.since_s = "", False, 0.0
