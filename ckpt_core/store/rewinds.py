"""The order of saves: which are below the newest step, since training went back, and which come too late."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection
from pathlib import Path

from ckpt_core.errors import CommitError

logger = logging.getLogger(__name__)

_TEXT = (
    "step %d is saved while %s holds step %d: a restart resumes from step %d, not from this one. To go on "
    "from here, use another root, or remove what is newer than the last save of this run once it has ended "
    "(ckpt-core rm %s --after N, N being the step of that save). Until then the last save of this run is "
    "kept beside the newest steps"
)

_REMEMBERED = 1024
"""Far more saves than may be in flight."""


class Rewinds:
    """Which saves were below the newest step, or are overtaken. The caller serializes its calls.

    Saves in flight together are begun and published in any order. A run has gone back only if the newer
    step was there, or its save admitted, before the older one was admitted.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._attempts: set[str] = set()
        self._last: int | None = None
        self._last_turn = 0
        self._order = itertools.count(1)
        self._admitted: dict[str, int] = {}
        self._placed: dict[int, int] = {}
        self._turns: dict[str, int] = {}
        self._newest: dict[int, int] = {}
        self._line = 0

    def admitted(self, attempt_id: str) -> None:
        """Note that training has asked for a save, or has now ended one that it held open.

        `begun` does it for one that nobody announced. This and `gone_back` need no turn: each line is
        atomic, and training must not wait for names.
        """
        self._turns[attempt_id] = turn = next(self._order)
        self._admitted.setdefault(attempt_id, turn)
        if len(self._admitted) > _REMEMBERED:  # saves that failed
            oldest = next(iter(self._admitted))
            self._turns.pop(oldest, None)
            self._admitted.pop(oldest, None)

    def gone_back(self) -> None:
        """Training goes on from a step that it restores, with no save in flight: what is late is old."""
        self._line = next(self._order)

    def check_turn(self, attempt_id: str, step: int) -> None:
        """Called before a save gets its name. One that never began here was brought, and is never late.

        Raises:
            CommitError: it was given up, and has been overtaken.
        """
        turn = self._turns.get(attempt_id)
        if turn is not None and max(self._newest.get(step, 0), self._line) > turn:
            raise CommitError(
                f"step {step} was not published: a later save of it has been, or training has gone back "
                f"since. Committed steps are untouched",
                step=step,
                path=self._root,
            )

    def begun(self, attempt_id: str, step: int, *, committed: Collection[int]) -> None:
        """Note the start of a save; the first one below the newest step is told to the user."""
        if attempt_id not in self._admitted:
            self.admitted(attempt_id)
        mine = self._admitted.get(attempt_id, 0)
        self._placed = {other: self._placed[other] for other in committed if other in self._placed}
        before = [other for other in committed if self._placed.get(other, 0) < mine]
        newest = max(before, default=step)
        if newest <= step:
            return
        if not self._attempts:
            logger.warning(_TEXT, step, self._root, newest, newest, self._root)
        self._attempts.add(attempt_id)

    def published(self, attempt_id: str, step: int) -> None:
        """Note the end of a save; one that never began here was brought, and says nothing of this run."""
        if attempt_id not in self._admitted:
            return
        self._placed[step] = self._admitted.pop(attempt_id, 0)
        self._newest.pop(step, None)
        self._newest[step] = turn = self._turns.pop(attempt_id, 0)
        if len(self._newest) > _REMEMBERED:
            self._newest.pop(next(iter(self._newest)))
        # An earlier one that comes to its end only now is not the last one.
        if turn > self._last_turn:
            self._last_turn = turn
            self._last = step if attempt_id in self._attempts else None

    def kept(self) -> set[int]:
        """What retention must leave alone: the last save, if it was below the newest step."""
        return set() if self._last is None else {self._last}
