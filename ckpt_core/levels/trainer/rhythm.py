"""Whether any step that is saved goes to a level: an `every` that none meets is said once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ckpt_core.levels.wants import meets
from ckpt_core.options import Level
from ckpt_core.save import Followed

_log = logging.getLogger("ckpt_core")

_ENOUGH = 3
"""So many committed steps show from which one to the next the loop goes."""

_FAR = 10
"""After so many multiples of `every` none is expected any more."""


class Rhythm:
    """The committed steps so far, against `every`."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = list(levels)
        self._under_way: list[Followed] = []
        self._count = self._stride = self._first = self._newest = 0

    def follow(self, save: Followed) -> None:
        """A save has begun. Called on the training thread; one append."""
        if self._levels:
            self._under_way.append(save)

    def look(self) -> None:
        """Count what has been committed since, and say what is to be said. Called by another thread."""
        while self._under_way and self._under_way[0].committed.done():
            save = self._under_way.pop(0)
            if save.committed.exception() is None:
                self._committed(save.step)

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
