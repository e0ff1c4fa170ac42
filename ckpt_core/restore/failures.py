"""Kinds of RestoreError that only this package tells apart. Callers catch RestoreError."""

from __future__ import annotations

import errno
from pathlib import Path

from ckpt_core.errors import NotCommitted, RestoreError
from ckpt_core.system.files import advice
from ckpt_core.types import parse_step_dir

MOST_TRIES = 5
"""A step of a root is retired only when there is a newer one, which a new look shows."""

_THREADS = (
    "The limit of threads or processes is reached (ulimit -u, or that of the container), or that of memory "
    "in which their stacks lie (ulimit -v): raise it."
)


class ReadRefused(RestoreError):
    """The system refused a read: an older step may still be readable. Its cause is the OSError."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path} cannot be read: {error.strerror or error}. Nothing on storage was changed. "
            f"{advice(error)}",
            path=path,
        )


class Elsewhere(RestoreError):
    """What is needed lies in the root of another node: a further level may have all of it."""


class Misplaced(RestoreError):
    """What is private to this rank lies in the root of another node: a further level may have that too."""


class NotBrought(RestoreError):
    """A further level has the step, and it cannot be brought now: an older step may still be here."""


class NoMeans(RestoreError):
    """This process lacks memory, threads or descriptors to read with: no other step could be read either."""

    def __init__(self, path: Path, error: BaseException) -> None:
        super().__init__(
            f"{path} cannot be read: {str(error) or type(error).__name__}. Nothing on storage was changed. "
            f"{_THREADS if isinstance(error, RuntimeError) else advice(error)}",
            path=path,
        )


class CutShort(NoMeans):
    """The process ends while a thread of it reads: what is not read yet never will be."""

    def __init__(self, path: Path) -> None:
        RestoreError.__init__(
            self,
            f"{path} was not read to its end: this process ends. Nothing on storage was changed. Wait for "
            f"the thread that reads before the program ends",
            path=path,
        )


def check_means(path: Path, error: OSError) -> None:
    """Tell what this process lacks from what the storage refuses, before a read counts as refused.

    Raises:
        NoMeans: there is no descriptor or no memory.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise NoMeans(path, error) from error


class ReadHung(RestoreError):
    """A read does not return: reads of older steps would not either."""


class Retired(NotCommitted):
    """A step went away, or was replaced, before it had been read whole. It was not damaged."""

    def __init__(self, step_dir: Path) -> None:
        super().__init__(
            f"{step_dir} was retired or replaced by its writer while it was read. It is not damaged: read "
            "a newer step, or keep one for its readers (ckpt-core pin, keep_last)",
            step=parse_step_dir(step_dir.name),
            path=step_dir,
        )


def retired_too_fast(root: Path | str) -> NotCommitted:
    """Of a root that was looked at anew `MOST_TRIES` times, each time in vain."""
    return NotCommitted(
        f"{root}: steps are retired faster than they can be read: keep more of them (keep_last), or pin one "
        "and load that",
        path=root,
    )
