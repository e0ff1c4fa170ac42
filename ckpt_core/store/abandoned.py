"""Directories of attempts that have failed."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path

from ckpt_core.store.trees import remove_tree
from ckpt_core.system.files import Files

_SWEPT = 16


class Abandoned:
    """Deletes them. Where other ranks write too, the last few are looked at again: a slower rank may
    have put a file there since.
    """

    def __init__(self, files: Files, *, shared: bool) -> None:
        self._files = files
        self._paths: collections.deque[Path] = collections.deque(maxlen=_SWEPT if shared else 0)

    def remove(self, path: Path) -> None:
        """Delete one.

        Raises:
            OSError: not all of it could be deleted.
        """
        self._paths.append(path)
        remove_tree(self._files, path)

    def sweep(self) -> None:
        """Delete what was written into the last few since; never raises."""
        for path in tuple(self._paths):
            with contextlib.suppress(OSError):
                remove_tree(self._files, path)
