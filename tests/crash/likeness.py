"""Which killed roots are the same, so that one of them need be looked at: what is in them decides.

Ids of attempts and names of slots are drawn at random, and a manifest has its time and a checksum of both:
roots that differ in nothing else, and in the order of these times, are alike. Whoever opens one of them does
what it would do to the other.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ckpt_core.layout import MANIFEST_NAME

_DRAWN = re.compile(rb"(?<=[0-9]{12}-)[0-9a-f]{8}|(?<=\.slots/)[0-9a-f]{16}")
_TIME = re.compile(rb'"created_unix_s":[0-9.e+]+')
_SUM_OF_BOTH = re.compile(rb'"xxh3":"[0-9a-f]{16}"\}\s*\Z')
_LOCK = ".lock"
"""Says which process had the root last."""


def likeness(root: Path) -> bytes:
    """Equal for roots that are alike, and for no others."""
    paths = list(root.rglob("*"))
    # Repair takes the manifest that was written last.
    times = {path: path.stat().st_mtime_ns for path in paths if path.name == MANIFEST_NAME}
    order = sorted(set(times.values()))
    rows = [_row(root, path, order.index(times[path]) if path in times else -1) for path in paths]
    # By what was not drawn, so that whatever was drawn gets the same number in roots that are alike.
    rows.sort(key=lambda row: _DRAWN.sub(b"", row))
    numbers: dict[bytes, bytes] = {}
    text = b"\n".join(
        _DRAWN.sub(lambda found: numbers.setdefault(found[0], b"%d" % len(numbers)), row)
        for row in rows
    )
    return hashlib.sha256(text).digest()


def _row(root: Path, path: Path, age: int) -> bytes:
    """All there is to know of a name: what it names, and the bytes of a file."""
    name = os.fsencode(path.relative_to(root))
    if path.is_symlink() or not path.is_file():
        return b"%s: %o" % (name, path.lstat().st_mode)
    content = b"" if path.name == _LOCK else path.read_bytes()
    if path.name == MANIFEST_NAME:
        content = _SUM_OF_BOTH.sub(b"", _TIME.sub(b"", content))
    # A file that another step has too is no slot.
    return b"%s: file, %d, %d: %s" % (name, age, path.stat().st_nlink, content)
