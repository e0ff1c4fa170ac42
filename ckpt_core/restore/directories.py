"""Which directories of files a root holds. Torch-free."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from ckpt_core.errors import RestoreError
from ckpt_core.layout import is_directory_name
from ckpt_core.restore.deadline import READ_TIMEOUT_S
from ckpt_core.restore.failures import NoMeans, ReadHung
from ckpt_core.restore.manifests import StepManifest, file_problems, read_json
from ckpt_core.restore.watch import undisturbed
from ckpt_core.store import listing
from ckpt_core.system.files import Files


def committed_directories(
    root: str | os.PathLike[str], *, pointer: str | None = None
) -> tuple[str, ...]:
    """Names of the directories that `begin_files` committed in `root`, newest first; () without any.

    Reads their manifests and the sizes of their files; one that lacks a file, or has one of another size,
    is left out. Takes no lock.

    Args:
        pointer: only those that were committed with this one.

    Raises:
        RestoreError: the root cannot be listed, the storage hangs, or there is no memory or thread to read
            with.
    """
    files, found = Files(), []
    root = root if isinstance(root, Path) else Path(root)
    for name in _folders(root):
        path = root / name
        try:
            step = undisturbed(path, partial(_whole, path, files), timeout_s=READ_TIMEOUT_S)
        except (NoMeans, ReadHung):
            raise  # It says nothing of the directory.
        except RestoreError:
            continue  # somebody else's, or damaged
        if step is not None and pointer in (None, step.manifest.pointer):
            found.append((step.manifest.created_unix_s, step.manifest.step, name))
    return tuple(name for _, _, name in sorted(found, reverse=True))


def _whole(path: Path, files: Files) -> StepManifest | None:
    """A directory of files without a fault that can be seen from outside."""
    step = read_json(path, files=files)
    for problem in file_problems(step) if step.manifest.directory is not None else ():
        raise problem
    return None if step.manifest.directory is None else step


def _folders(root: Path) -> list[str]:
    with listing(root):
        try:
            with os.scandir(root) as found:
                names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
    return [name for name in names if is_directory_name(name)]
