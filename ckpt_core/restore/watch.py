"""Did a step go away while it was read?"""

from __future__ import annotations

import os
from pathlib import Path


class Watch:
    """Remembers which directory had a step's name when reading began.

    A reader takes no lock, so a writer in another process may retire the step meanwhile and overwrite
    its files in place. The name goes first, durably: a step that still has its name after the last read
    was whole, and one that has not may look corrupt and is not.
    """

    def __init__(self, step_dir: Path) -> None:
        self._step_dir = step_dir
        self._identity = _identity(step_dir)

    def still_there(self) -> bool:
        """Whether the same directory has that name now."""
        return self._identity is not None and _identity(self._step_dir) == self._identity


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
