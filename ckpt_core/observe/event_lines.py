"""Reading a file of events back, also while it is written. Its lines are those of `event_file`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

_TELLING = 64
"""What comes before the place where reading goes on tells whether the file is still the same."""

_NEEDED = {"name": str, "time_s": int | float, "rank": int}


class EventLines:
    """One file, read step by step; from its begin again where it was cut off, or another took its name.

    Attributes:
        unreadable: whole lines so far that are no lines of an event file; they are left out.
        cut: the last line is not whole: it is being written, or never will be.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self.cut = False
        self._offset = 0
        self._file = (0, 0)
        self._before = b""

    def read(self, path: Path, *, most_bytes: int = -1) -> list[dict[str, Any]]:
        """Whatever whole lines have come since the last time; none where there is no file yet.

        Each has at least a `name`, a `time_s` and a `rank`; what else it holds is not checked.

        Args:
            most_bytes: read no more at once; a longer line is left out. -1: all.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with path.open("rb") as file:
                self._follow(file)
                data = file.read(most_bytes)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.cut = len(whole) < len(data)
        if self.cut and not whole and len(data) == most_bytes:
            whole = data
        self._offset += len(whole)
        self._before = (self._before + whole)[-_TELLING:]
        lines = [_parsed(line) for line in whole.splitlines()]
        self.unreadable += lines.count(None)
        return [line for line in lines if line is not None]

    def _follow(self, file: BinaryIO) -> None:
        """Go to where reading goes on; of another file, or one that was written anew, that is its begin."""
        now = os.fstat(file.fileno())
        same = (now.st_dev, now.st_ino) == self._file
        if same and 0 < self._offset <= now.st_size:
            file.seek(self._offset - len(self._before))
            if file.read(len(self._before)) == self._before:
                return
        self._file, self._offset, self._before = (now.st_dev, now.st_ino), 0, b""
        file.seek(0)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    whole = all(isinstance(line.get(key), kind) for key, kind in _NEEDED.items())
    return line if whole else None
