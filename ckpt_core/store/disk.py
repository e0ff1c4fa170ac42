"""`Disk`: whether a root is still where it was, or the disk that it is on has dropped out of its place.

Where a filesystem is unmounted, its mount point is an empty directory of the disk below; where another one
is mounted over it, what was there is hidden. What was saved there would be hidden in turn once the first one
is back, and no step of it be found. A directory that is mounted in a second place (a container's volume) may
be of the same filesystem as that place: each mount has a number of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_core.errors import PersistError
from ckpt_core.store.failures import mapped

_Place = tuple[int, int | None]
"""A filesystem, and the mount by which it is there; None: the system does not tell."""


class Disk:
    """Which filesystem a root is on; noted while it is known to be there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place: _Place | None = None
        self._above: _Place | None = None

    def note(self) -> None:
        """The root is where it belongs. Raises OSError."""
        self._place, self._above = _place_of(self._root), _place_of(self._root.parent)

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
            place = _place_of(found)
        if self._place in (None, place) or self._is_removed(found, place) or is_back():
            return
        raise PersistError(
            f"{found} is not on the disk that the checkpoint root {self._root} is on: that was unmounted, or "
            f"another one was mounted over it. Nothing was written, and committed steps are safe on it. "
            f"Mount it again, and saves go on; to begin anew on what is there now, start the job anew",
            path=self._root,
        )

    def _is_removed(self, found: Path, place: _Place) -> bool:
        """A root that had a number of its own (a subvolume) and was removed leaves its parent as it was.

        One that was a mount point cannot be removed while it is one.
        """
        if found != self._root.parent or place != self._above:
            return False
        return self._place is not None and self._place[1] == place[1]


def _place_of(path: Path) -> _Place:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mount = None
        with suppress(OSError):  # where nothing is mounted at /proc
            found = re.search(r"mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text())
            mount = int(found[1]) if found else None
        return os.fstat(fd).st_dev, mount
    finally:
        os.close(fd)
