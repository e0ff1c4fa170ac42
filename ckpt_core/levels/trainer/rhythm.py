"""Whether what is saved goes to a level: an `every` that none meets, and newer steps there, are said once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from ckpt_core.levels.mailbox import LevelStatus
from ckpt_core.levels.wants import meets
from ckpt_core.options import Level
from ckpt_core.save import Followed
from ckpt_core.store import committed_steps

_log = logging.getLogger("ckpt_core")

_ENOUGH = 3
"""So many committed steps show from which one to the next the loop goes."""

_FAR = 10
"""After so many multiples of `every` none is expected any more."""


_AHEAD = (
    "step %d is saved while the level %s holds step %d: a restart resumes from step %d, not from this one, "
    "and what is saved below it is not sent there. To go on from here, remove what is newer than the last "
    "save of this run once it has ended (ckpt-core rm %s --after N, N being the step of that save)"
)


class Rhythm:
    """The committed steps so far, against `every` and what is at the levels."""

    def __init__(self, levels: Sequence[Level], root: Path) -> None:
        self._levels, self._root = list(levels), root
        self._of_nodes = [level.of_nodes for level in levels]
        self._has_told = False
        self._under_way: list[Followed] = []
        self._count = self._stride = self._first = self._newest = 0
        self._compared = (0, 0)

    def follow(self, save: Followed) -> None:
        """A save has begun. Called on the training thread; one append."""
        self._under_way.append(save)

    def look(self, seen: Sequence[LevelStatus | None]) -> None:
        """Count what has been committed since, and say what is to be said. Called by another thread.

        Args:
            seen: what is known of each level, where it is for this process to say so.
        """
        while self._under_way and self._under_way[0].committed.done():
            save = self._under_way.pop(0)
            if save.has_committed:
                self._committed(save.step)
        if self._count and not self._has_told:
            self._look_ahead(seen)

    def _look_ahead(self, seen: Sequence[LevelStatus | None]) -> None:
        """Say where a level holds newer steps than this run and its root."""
        there, url = max(
            (
                (max(status.steps, default=-1), status.url)
                for status, of_nodes in zip(seen, self._of_nodes, strict=False)
                # What nodes keep of one another goes by itself.
                if status is not None and not of_nodes
            ),
            default=(-1, ""),
        )
        if there <= self._newest or (self._count, there) == self._compared:
            return
        self._compared = self._count, there
        # Of newer steps in the root the store has told.
        if there > max(committed_steps(self._root), default=-1):
            self._has_told = True
            _log.warning(_AHEAD, self._newest, url, there, there, self._root)

    def _committed(self, step: int) -> None:
        self._first = step if self._count == 0 else self._first
        self._stride = math.gcd(self._stride, step - self._first)
        self._newest = max(self._newest, step)
        self._count += 1
        for level in tuple(self._levels):
            if meets(step, level):
                self._levels.remove(level)
            elif self._count >= _ENOUGH and self._misses(level.every):
                self._levels.remove(level)
                self._say(level)

    def _say(self, level: Level) -> None:
        fits = math.gcd(self._stride, self._first)
        _log.warning(
            "no step goes to the level %s: every=%d, and of the steps %d to %d none is a multiple of it. "
            "Give the level every=%d, of which they all are, or save at multiples of %d",
            *(level.url, level.every, self._first, self._newest, fits, level.every),
        )

    def _misses(self, every: int) -> bool:
        """Whether steps that go on like this meet no multiple of it, or hardly one."""
        never = self._first % math.gcd(self._stride, every) != 0
        return never or self._newest - self._first >= _FAR * every
