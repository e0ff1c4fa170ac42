"""Saves below the newest step: training went back by hand, and goes on from an older one."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_TEXT = (
    "step %d is saved while %s holds step %d: a restart resumes from step %d, not from this one. To go on "
    "from here, remove what is newer (ckpt-core rm %s --after %d) or use another root. Until then the "
    "last save of this run is kept beside the newest steps"
)


class Rewinds:
    """Which saves were such ones. The caller serializes its calls."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._attempts: set[str] = set()
        self._last: int | None = None

    def begun(self, attempt_id: str, step: int, *, newest: int | None) -> None:
        """Note the start of a save; the first one below the newest step is told to the user."""
        if newest is None or step >= newest:
            return
        if not self._attempts:
            logger.warning(_TEXT, step, self._root, newest, newest, self._root, step)
        self._attempts.add(attempt_id)

    def published(self, attempt_id: str, step: int) -> None:
        """Note the end of a save."""
        self._last = step if attempt_id in self._attempts else None

    def kept(self) -> set[int]:
        """What retention must leave alone: the last save, if it was below the newest step."""
        return set() if self._last is None else {self._last}
