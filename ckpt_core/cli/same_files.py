"""Files that steps share: one file with a name in each."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ckpt_core.layout import parse_shard_name
from ckpt_core.store import committed_steps, entries, step_path
from ckpt_core.types import parse_step_dir

Identity = tuple[int, int]
"""Device and inode: the same for all names of a file."""


def identity(path: Path) -> Identity | None:
    """Which file has a name; None where there is none."""
    with suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None


class SameFiles:
    """Which steps of a root have a file; the root is gone through once, when that is first asked."""

    def __init__(self) -> None:
        self._steps: dict[Path, dict[Identity, list[int]]] = {}

    def steps_with(self, path: Path) -> list[int]:
        """The other steps of the same root that have this file."""
        root, wanted = path.parent.parent, identity(path)
        if wanted is None:
            return []
        if root not in self._steps:
            self._steps[root] = _steps_by_file(root)
        own = parse_step_dir(path.parent.name)
        return [step for step in self._steps[root].get(wanted, ()) if step != own]


def _steps_by_file(root: Path) -> dict[Identity, list[int]]:
    found: dict[Identity, list[int]] = {}
    for step in committed_steps(root):
        names = entries(step_path(root, step))
        shards = [Path(entry.path) for entry in names if parse_shard_name(entry.name) is not None]
        for file in {identity(shard) for shard in shards}:
            if file is not None:
                found.setdefault(file, []).append(step)
    return found


def added_bytes(folders: Iterable[Path]) -> list[int | None]:
    """Bytes of the files in each of these directories that none before it has; None as `bytes_below`."""
    seen: set[Identity] = set()
    found: list[int | None] = []
    for folder in folders:
        files = files_below(folder)
        fresh = {(file.st_dev, file.st_ino): file.st_size for file in files or ()}
        added = sum(nbytes for mine, nbytes in fresh.items() if mine not in seen)
        found.append(None if files is None else added)
        seen.update(fresh)
    return found


def bytes_below(folder: Path) -> int | None:
    """Of all files in a directory and in those in it; None where this user may not look at all of them."""
    files = files_below(folder)
    return None if files is None else sum(file.st_size for file in files)


def files_below(folder: Path) -> list[os.stat_result] | None:
    """The files in a directory and in those in it, links not followed; None as `bytes_below`."""
    try:
        return list(_files_below(folder))
    except PermissionError:
        return None


def _files_below(folder: Path) -> Iterator[os.stat_result]:
    folders = [folder]
    while folders:
        for entry in _entries(folders.pop()):
            with suppress(FileNotFoundError):  # retired meanwhile
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(Path(entry.path))
                elif stat.S_ISREG(found.st_mode):
                    yield found


def readable_entries(folder: Path) -> list[os.DirEntry[str]]:
    """As `entries`; nothing where they cannot be read."""
    with suppress(PermissionError):
        return _entries(folder)
    return []


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(NotADirectoryError):
        return entries(folder)
    return []
