"""Directories of files beside the steps, and the pointers that name the newest of them.

Called by `StepStore` with its lock on names held. Functions here let `OSError` through.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, is_directory_name
from ckpt_core.store.names import INFLIGHT
from ckpt_core.store.publish import Attempt
from ckpt_core.store.trees import ensure_dir
from ckpt_core.system.files import Files
from ckpt_core.types import Destination

_POINTER = ".pointer"


def file_path(files: Files, attempt: Attempt, name: str) -> Path:
    """Where a file of an attempt goes; makes the directories that are missing on the way.

    Called before the file is made; their names become durable with the syncs before the rank's vote.
    """
    folder = attempt.path
    *parents, last = name.split("/")
    for parent in parents:
        folder = folder / parent
        ensure_dir(files, folder)
    return folder / last


def newest_unix_s(root: Path, files: Files) -> float:
    """When the newest directory of files in the root was made, by its own word; 0 where there is none.

    Called on a finisher thread. What cannot be read counts for nothing: no list of directories has it.
    """
    newest = 0.0
    for name in filter(is_directory_name, os.listdir(root)):
        path = root / name / MANIFEST_NAME
        with contextlib.suppress(OSError, CkptError):
            fd = files.open_read(path)
            try:
                nbytes = min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES)
                manifest = Manifest.decode(files.first(fd, nbytes), path=path)
            finally:
                files.close(fd)
            if manifest.directory == name:
                newest = max(newest, manifest.created_unix_s)
    return newest


class Directories:
    """Which save has come furthest: neither a directory nor a pointer ever goes back to an older one."""

    def __init__(self, root: Path, *, files: Files) -> None:
        self._root = root
        self._files = files
        self._placed: dict[str, int] = {}
        self._pointed: dict[str, int] = {}

    def is_overtaken(self, to: Destination) -> bool:
        """Whether a younger save of the same directory was published first."""
        return self._placed.get(to.directory, to.order) > to.order

    def placed(self, to: Destination) -> None:
        """Note that a save has been published."""
        self._placed[to.directory] = to.order

    def point(self, attempt: Attempt, to: Destination) -> None:
        """Let the pointer name the directory, durably, unless a younger save has moved it already.

        Called once the directory is durable. A crash leaves the pointer as it was, or moved.
        """
        pointer = to.pointer
        if pointer is None or self._pointed.get(pointer, to.order) > to.order:
            return
        fresh = self._root / INFLIGHT / f"{attempt.id}{_POINTER}"
        ensure_dir(self._files, fresh.parent)
        try:
            self._files.write_new(fresh, to.directory.encode())
            # Commit point of the pointer.
            self._files.rename(fresh, self._root / pointer)
        except OSError:
            _forget(self._files, fresh)
            raise
        self._pointed[pointer] = to.order
        self._files.sync_dir(self._root)


def _forget(files: Files, path: Path) -> None:
    with contextlib.suppress(OSError):  # reopening deletes it
        files.unlink(path)
