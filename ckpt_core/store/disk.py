"""`Disk`: whether a root is still where it was, or the disk that it is on has dropped out of its place.

Where a filesystem is unmounted, its mount point is an empty directory of the disk below; where another one
is mounted over it, what was there is hidden. What was saved there would be hidden in turn once the first one
is back, and no step of it be found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt_core.errors import PersistError
from ckpt_core.store.failures import mapped


class Disk:
    """Which filesystem a root is on; noted while it is known to be there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._device: int | None = None
        self._above: int | None = None

    def note(self) -> None:
        """The root is where it belongs. Raises OSError."""
        self._device = self._root.stat().st_dev
        self._above = self._root.parent.stat().st_dev

    def check(self, is_back: Callable[[], bool]) -> None:
        """Be sure that what is written to the root now, or a root that is made anew, is on that filesystem.

        Args:
            is_back: whether what is there is our root after all: mounted again, a filesystem may have another
                number.

        Raises:
            PersistError: it is not there, or that cannot be told now.
        """
        with mapped("look at the checkpoint root", path=self._root):
            found = next(path for path in (self._root, *self._root.parents) if path.exists())
            device = found.stat().st_dev
        # A root that was a filesystem of its own (a subvolume) and was removed leaves its parent as it was.
        is_removed = found == self._root.parent and device == self._above
        if self._device in (None, device) or is_removed or is_back():
            return
        raise PersistError(
            f"{found} is not on the disk that the checkpoint root {self._root} is on: that was unmounted, or "
            f"another one was mounted over it. Nothing was written, and committed steps are safe on it. "
            f"Mount it again, and saves go on; to begin anew on what is there now, start the job anew",
            path=self._root,
        )
