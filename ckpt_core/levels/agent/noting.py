"""`Notes`: which saves have come to a level, and which never will, as the status of its agent has it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from ckpt_core.levels.agent.board import Board
from ckpt_core.levels.agreed import Save

logger = logging.getLogger(__name__)


class Notes:
    """Those of one level. Used by one thread.

    Each save is noted once, whatever becomes of it at the level afterwards.
    """

    def __init__(self, url: str, board: Board) -> None:
        self._url, self._board = url, board
        self._seen: dict[int, str] = {}
        self._settled: dict[int, str] = {}

    def look(
        self,
        fitting: Mapping[int, str],
        there: Mapping[int, str],
        sought: Save | None,
        lesser: Collection[Save] = (),
    ) -> None:
        """Find out what has come there, and what never will.

        Args:
            fitting: saves that the level takes, of those that are before it.
            there: what is whole there.
            sought: goes there however old it is.
            lesser: these do not, since what is there of the same step stays.
        """
        settled = self._settled.items() & fitting.items()
        self._settled = dict(settled)
        self._seen |= {step: fitting[step] for step in fitting.keys() - self._settled.keys()}
        newest = max(there, default=-1)
        for step, attempt in list(self._seen.items()):
            if there.get(step) == attempt:
                with self._board.change(self._url) as status:
                    status.has_reached(step, attempt)
            elif (step, attempt) not in lesser and (
                step > newest or step in there or (step, attempt) == sought
            ):
                continue  # still to come
            else:
                self._pass_over(step, attempt)
            self._settled[step] = self._seen.pop(step)

    def give_up(self, step: int, attempt: str) -> None:
        """It never comes there, or is there no more and does not come back."""
        with self._board.change(self._url) as status:
            if status.skipped.get(step) == attempt:
                return
            status.has_skipped(step, attempt)
        logger.info("%s: step %d was passed over", self._url, step)

    def _pass_over(self, step: int, attempt: str) -> None:
        with self._board.change(self._url) as status:
            has_come = status.reached.get(step) == attempt
        if not has_come:
            self.give_up(step, attempt)
