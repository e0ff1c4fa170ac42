"""`Pins`: what is pinned in a root is pinned at one level, and stays so there when the root is lost.

    before    a step that is pinned is so before it can be seen there
    pin       so is one that was pinned since
    unpin     those that somebody has unpinned are not any more, once all has come that was to come then

A pin that is missing in the root says nothing: the root may be new. A mark of `store.pins` does. Several
nodes may have the level, each with a root of its own: whoever still pins a step pins it there again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ckpt_core.errors import NotCommitted
from ckpt_core.levels.agent.board import Board
from ckpt_core.levels.agent.claims import check_fence
from ckpt_core.levels.agreed import Save
from ckpt_core.levels.far.door import Far
from ckpt_core.store import forget_marks, pinned_steps, unpinned_marks
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)


class Pins:
    """The pins of one level, as the root of this agent has them. For one thread."""

    def __init__(self, root: Path, url: str, board: Board, *, files: Files) -> None:
        self._root, self._url, self._board, self._files = root, url, board, files
        self._there: frozenset[int] = frozenset()
        self._told: set[str] = set()
        self._before: dict[str, frozenset[Save]] = {}

    def look(self, far: Far) -> None:
        """See which of them are still there: others may have taken some."""
        if self._there:
            self._there = far.pins(self._there)

    def pin(self, far: Far, steps: Collection[int]) -> None:
        """Pin those steps that are there as they are in the root.

        Raises:
            Fenced: a later session has the level.
            Away: it did not do as asked.
        """
        pinned = pinned_steps(self._root).intersection(steps)
        for step in sorted(pinned - self._there):
            check_fence(far, self._board.plan, self._root)
            with suppress(NotCommitted):  # it has gone from there meanwhile
                self._pin(far, step)
        told = sorted(pinned & self._there)
        if self._board.pinned(self._url) != told:
            with self._board.change(self._url) as status:
                status.pinned = told

    def unpin(self, far: Far, coming: frozenset[Save]) -> None:
        """Unpin what somebody has unpinned, once all has come that was to come when that was seen first.

        What has taken the place of the best step is there by then, if it ever comes there. Raises as `pin`.

        Args:
            coming: saves that may still come there.
        """
        # Order matters: a step is marked before it is unpinned, and pinned before it has no mark any more.
        marks = unpinned_marks(self._root)
        pinned = pinned_steps(self._root)
        self._told &= marks.keys()
        self._before = {name: self._before.get(name, coming) for name in marks}
        for name in sorted(marks.keys() - self._told):
            if marks[name] not in pinned and self._before[name].isdisjoint(coming):
                check_fence(far, self._board.plan, self._root)
                far.pin(marks[name], False)
                self._there -= {marks[name]}
                self._told.add(name)
        done = self._board.has_unpinned(self._url, self._told)
        if done:
            forget_marks(self._root, done, files=self._files)

    def before(self, far: Far, step: int) -> None:
        """A step is about to be seen there, for the first time or as another save. Raises Away."""
        if step in pinned_steps(self._root):
            self._pin(far, step)

    def _pin(self, far: Far, step: int) -> None:
        far.pin(step, True)
        self._there |= {step}
        logger.info("%s: step %d is pinned", self._url, step)
