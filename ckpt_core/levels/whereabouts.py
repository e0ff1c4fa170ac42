"""Where a root is, as it notes it itself: so a copy of it knows that it is one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_core.system.files import Files


def place_of(root: Path, file: Path) -> dict[str, Any]:
    """What tells a root from its copies, all taken together.

    Args:
        file: one in it, written once.
    """
    place: dict[str, Any] = {"path": os.path.realpath(root)}
    with suppress(OSError):
        found = os.stat(file)
        # With the time of its writing: on another disk the number may be the same.
        place |= {"file": [found.st_ino, found.st_mtime_ns], "touched": found.st_ctime_ns}
    return place


def is_elsewhere(there: object, root: Path, file: Path) -> bool:
    """Whether what `place_of` gave was given in another root, of which this one is a copy; or before it was
    moved to another disk.
    """
    if not isinstance(there, dict) or there.get("file") is None:
        return False  # nothing was noted, or by a release of before
    here = place_of(root, file)
    elsewhere = there.get("path") != here["path"]
    if there["file"] != here.get("file"):
        # A network filesystem may number its files anew when it is mounted again, or elsewhere.
        return elsewhere or Files().is_local(root)
    # A root that was renamed is not touched, while who makes links to its files touches them. Under its own
    # path it may be: by a mount that changes owners, or such a backup.
    return elsewhere and bool(there.get("touched") != here["touched"])
