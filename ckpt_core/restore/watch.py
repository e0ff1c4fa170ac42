"""Does a step stay what it is while it is read?

A reader takes no lock, so a writer in another process may retire the step meanwhile, put it back, or give its
name to a newer save of the same step. What is wrong then is not wrong with the step: a file is not found
where it was a moment ago, or two files are of different saves. Bytes that were read are sound: a file that
somebody has open is never written again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from ckpt_core.restore.deadline import within
from ckpt_core.restore.failures import NoMeans, ReadHung, Retired
from ckpt_core.store import is_committed
from ckpt_core.types import parse_step_dir

_Result = TypeVar("_Result")

_MOST_TRIES = 5
_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)


class Watch:
    """Which directory had a step's name when reading began; entered for as long as it is read.

    It is held open, so that its inode number is not given to a later save of the same step.
    """

    def __init__(self, step_dir: Path) -> None:
        self._step_dir = step_dir
        self._fd: int | None = None
        self._found: os.stat_result | None = None
        try:
            self._fd = os.open(step_dir, _FLAGS)
            self._found = os.fstat(self._fd)
        except OSError as exc:
            if exc.errno not in _NOT_THERE:
                self._found = _stat(step_dir)  # no descriptor is to be had: its name must do

    def still_there(self) -> bool:
        """Whether the same directory has that name now."""
        now = _stat(self._step_dir)
        return self._found is not None and now is not None and os.path.samestat(self._found, now)

    def stood_still(self) -> bool:
        """Whether it has had that name all the time: a directory that is renamed shows it."""
        now = _stat(self._step_dir)
        if self._found is None or now is None or not os.path.samestat(self._found, now):
            return False
        return now.st_ctime_ns == self._found.st_ctime_ns

    def close(self) -> None:
        """Let the directory go. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def undisturbed(step_dir: Path, read: Callable[[], _Result], *, timeout_s: float) -> _Result:
    """What `read` returns or raises of a step that was one and the same from its first file to its last.

    A step that was replaced, or taken away and put back, is read again.

    Args:
        read: reads it whole; what it raises is believed only if the step stood still.
        timeout_s: longest time that opening the directory may take.

    Raises:
        Retired: it was retired before it was read whole, or is replaced faster than it can be read.
    """
    for more in reversed(range(_MOST_TRIES)):
        with within(timeout_s, lambda: Watch(step_dir), path=step_dir) as watch:
            try:
                found = read()
            except Exception as exc:
                if isinstance(exc, ReadHung | NoMeans) or watch.stood_still():
                    raise
                if not more and watch.still_there():
                    raise  # others change the directory all the time, and this is wrong each time
                if not more or not _is_there(step_dir):
                    raise Retired(step_dir) from exc
            else:
                if watch.stood_still() or (not more and watch.still_there()):
                    return found
                if not _is_there(step_dir):
                    break
    raise Retired(step_dir)


def _is_there(step_dir: Path) -> bool:
    """Whether there is something to read again; waits while a writer has the step aside for an instant."""
    step = parse_step_dir(step_dir.name)
    return step_dir.is_dir() or (step is not None and bool(is_committed(step_dir.parent, step)))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
