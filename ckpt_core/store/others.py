"""What others have put into a directory of files stays there when the directory is replaced."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from mmap import ACCESS_READ, mmap
from pathlib import Path

from ckpt_core.store.trees import ensure_dir
from ckpt_core.system.files import Files

_OURS = ("manifest.json", "rank-*.json", ".nfs*")


def keep_others(files: Files, source: Path, target: Path, replaces: Sequence[str]) -> None:
    """Give all files but ours in `source` the same names in `target`, durably. What is there already stays.

    Called by `place` before `target` has its name, so that a kill finds them in the one or in the other; and
    behind it, for what came meanwhile. They are links: whoever has one open goes on writing to it.

    Args:
        replaces: names of files that are ours too, with wildcards, whatever directory they lie in.
    """
    touched = {target}
    for name in sorted(_others(source, (*_OURS, *replaces))):
        folder = target
        # Where ours is a file and theirs a directory, or the other way round, ours is what counts.
        with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
            for parent in name.parts[:-1]:
                folder = folder / parent
                ensure_dir(files, folder)
                touched.add(folder)
            _give(files, source / name, folder / name.name)
    for folder in sorted(touched, reverse=True):
        files.sync_dir(folder)


def _others(folder: Path, ours: Sequence[str]) -> Iterator[Path]:
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from (entry.name / name for name in _others(Path(entry.path), ours))
        elif not any(fnmatchcase(entry.name, one) for one in ours):
            yield Path(entry.name)


def _give(files: Files, source: Path, target: Path) -> None:
    try:
        files.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # it belongs to another user, or the storage has no links
        if source.is_symlink():
            os.symlink(os.readlink(source), target)
            return
        with open(source, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            files.write_new(
                target, mmap(file.fileno(), nbytes, access=ACCESS_READ) if nbytes else b""
            )
        shutil.copystat(source, target)
