"""The one boundary where an `OSError` of a store operation becomes an error of ours."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.errors import CommitError, PersistError

_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer steps (keep_last)",
    errno.EDQUOT: "the disk quota is used up: free some space, or keep fewer steps (keep_last)",
    errno.EROFS: "the filesystem is read-only, often after a disk error: look at the kernel log",
    errno.EACCES: "check the owner and the permissions of that directory",
    errno.EPERM: "check the owner and the permissions of that directory",
    errno.ENOENT: "it was removed by somebody else; the next save makes the root anew",
    errno.ENOTDIR: "a file or a link is where a directory belongs: move it away",
    errno.EIO: "the disk is failing: look at the kernel log, and save to another one",
    errno.ENOLCK: "this filesystem has no locks: use a local disk, or NFS with its lock service",
}


@contextmanager
def mapped(
    doing: str,
    *,
    path: Path,
    step: int | None = None,
    error: type[PersistError] | type[CommitError] = PersistError,
) -> Iterator[None]:
    """Turn an `OSError` of the body into `error`, saying what is safe and what to do.

    Raises:
        PersistError, CommitError: as `error` says, with the `OSError` as its cause.
    """
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        hint = _HINTS.get(exc.errno or 0, "look at the kernel log and at the directory")
        where = f"step {step} in {path}" if step is not None else f"{path}"
        text = f"could not {doing} ({where}): {reason}. Committed steps are safe; {hint}"
        raise error(text, step=step, path=path) from exc
