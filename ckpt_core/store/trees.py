"""Directories of ours: making and deleting them without ever following a symbolic link."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ckpt_core.store.failures import mapped
from ckpt_core.store.names import entries
from ckpt_core.system.files import Files

_TRIES = 10


def ensure_dir(files: Files, path: Path) -> None:
    """Make one directory unless it is there; its name is durable after a sync of its parent.

    Raises:
        NotADirectoryError: a file or a symbolic link has that name.
        FileExistsError: something is there whenever it is made, and nothing whenever it is looked at.
    """
    for _ in range(_TRIES):
        try:
            files.mkdir(path)
        except FileExistsError as exc:
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                # Another rank gave the save up, and took the directory away in between.
                vanished = exc
                continue
            if not stat.S_ISDIR(mode):
                text = "a file or a symbolic link is in the way of a directory"
                raise NotADirectoryError(errno.ENOTDIR, text, str(path)) from None
            return
        else:
            return
    raise vanished


def find_root(root: Path, *, above: bool = True) -> Path:
    """The real path of a root: a link to it, or above it, may be pointed at another run's while it is open.

    Args:
        above: False: a link above it is followed at each use, as one that leads to the disk of a level.

    Raises:
        PersistError: it cannot be looked at.
    """
    with mapped("look at the checkpoint root", path=root):
        is_link = (
            root.is_symlink()
        )  # raises; realpath leaves a link that it cannot look at as it is
        return Path(os.path.realpath(root)) if is_link or above else root.absolute()


def ensure_root(files: Files, root: Path) -> None:
    """Make the root and the parents that are missing, each name durable."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (root, *root.parents)))
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            _make(files, path)
        _sync_parent(files, path)
    if not missing:
        # Its maker may have been killed before the sync. A root that was handed to us below a
        # directory that we may not read is durable by its owner's care.
        with contextlib.suppress(PermissionError):
            _sync_parent(files, root)


def device_of(root: Path) -> int:
    """Which filesystem a root is on, or would be made on. Raises OSError."""
    return next(path for path in (root, *root.parents) if path.exists()).stat().st_dev


def mount_of(root: Path) -> str:
    """Where the filesystem is mounted that a root is on, or would be made on."""
    path = os.path.realpath(root)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _make(files: Files, path: Path) -> None:
    try:
        files.mkdir(path)
    except FileNotFoundError as exc:
        if not path.parent.is_dir():
            raise
        # As `/proc` does: nobody has removed anything.
        text = f"{path.parent} takes no new directories"
        raise OSError(errno.EOPNOTSUPP, text, str(path)) from exc


def _sync_parent(files: Files, path: Path) -> None:
    # `sync_dir` refuses a link in the last component, and a parent may well be one.
    files.sync_dir(Path(os.path.realpath(path.parent)))


def remove_tree(files: Files, path: Path) -> None:
    """Delete a file, a link or a directory with all that is in it; links are deleted, not followed.

    Missing names are no error, so a deletion that was cut short can be repeated.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            files.unlink(path)
            return
        for entry in entries(path):
            remove_tree(files, Path(entry.path))
        files.rmdir(path)


def remove_each(files: Files, paths: Iterable[Path]) -> None:
    """`remove_tree` of all of them, whatever becomes of the others.

    Raises:
        OSError: the first of those that could not be deleted; all were tried.
    """
    trouble: OSError | None = None
    for path in paths:
        try:
            remove_tree(files, path)
        except OSError as exc:
            trouble = trouble or exc
    if trouble is not None:
        raise trouble
