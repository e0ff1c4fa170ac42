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


def added_bytes(folders: Iterable[Path]) -> list[int]:
    """Bytes of the files in each of these directories that none before it has."""
    seen: set[Identity] = set()
    found = []
    for folder in folders:
        added = 0
        for about in files_below(folder):
            mine = about.st_dev, about.st_ino
            if mine not in seen:
                seen.add(mine)
                added += about.st_size
        found.append(added)
    return found


def files_below(folder: Path) -> Iterator[os.stat_result]:
    """The files in a directory and in those in it, but what cannot be read; links are not followed."""
    folders = [folder]
    while folders:
        for entry in readable_entries(folders.pop()):
            with suppress(FileNotFoundError):  # retired meanwhile
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(Path(entry.path))
                elif stat.S_ISREG(found.st_mode):
                    yield found


def readable_entries(folder: Path) -> list[os.DirEntry[str]]:
    """As `entries`; nothing where they cannot be read."""
    with suppress(NotADirectoryError, PermissionError):
        return entries(folder)
    return []
