"""What `open` does about the traces of a kill or a power loss.

The states that a root can be found in, and what becomes of each:

    .inflight/<attempt>             never committed, or a step that was replaced       deleted
    .inflight/<attempt>.replaced    step there: it was replaced                        deleted
                                    step missing: killed between the two renames       renamed back
    .inflight/<name>.retired        unpublished, perhaps half recycled                 deleted
    .slots/*                        more than allowed, or not a recyclable file        deleted

Every part can be killed at any operation and be run again. Nothing outside these directories is
touched, and no symbolic link is followed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.files import Files
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.store.names import INFLIGHT, REPLACED, entries, step_path
from ckpt_core.store.publish import sync_names
from ckpt_core.store.slots import Slots
from ckpt_core.store.trees import remove_tree
from ckpt_core.types import parse_step_dir

logger = logging.getLogger(__name__)


def repair(root: Path, *, files: Files, slots: Slots) -> None:
    """Bring the root to a state in which every name means what it says.

    Called by `StepStore.open`, with the root's lock held. Leftovers that cannot be deleted are
    logged and stay: they cost space and nothing else.

    Raises:
        OSError: a replaced step could not be brought back, or the names not be made durable.
    """
    if entries(root / INFLIGHT):
        # Order matters: a killed process may have left a step unpublished in memory only. Its files
        # must not go before its name has gone for good.
        sync_names(files, root)
        _bring_back(root, files)
    try:
        for entry in entries(root / INFLIGHT):
            remove_tree(files, Path(entry.path))
        slots.trim()
    except OSError as exc:
        logger.warning("could not clear leftovers in %s: %s; they take space only", root, exc)


def _bring_back(root: Path, files: Files) -> None:
    moved = False
    for path in _replaced(root):
        step = step_of_attempt(path.name)
        if step is None or step_path(root, step).exists():
            continue
        files.rename(path, step_path(root, step))
        logger.warning("step %d was being replaced when its writer ended: brought it back", step)
        moved = True
    if moved:
        files.sync_dir(root)
        files.sync_dir(root / INFLIGHT)


def _replaced(root: Path) -> list[Path]:
    """Steps that were moved aside and are whole, newest first."""
    paths = [Path(entry.path) for entry in entries(root / INFLIGHT)]
    whole = [path for path in paths if path.name.endswith(REPLACED) and _is_whole(path)]
    return sorted(whole, key=lambda path: (path / MANIFEST_NAME).lstat().st_mtime_ns, reverse=True)


def _is_whole(path: Path) -> bool:
    manifest = path / MANIFEST_NAME
    if manifest.is_symlink() or not manifest.is_file():
        return False
    try:
        found = Manifest.decode(manifest.read_bytes(), path=manifest)
    except UnknownFormat:
        return True  # A newer release wrote it, and moved it here by the same rule.
    except CorruptCheckpoint:
        return False
    return found.step == step_of_attempt(path.name)


def step_of_attempt(name: str) -> int | None:
    """The step of "<step 12 digits>-<8 hex digits>...", or None when it is no such name."""
    digits, dash, _ = name.partition("-")
    return parse_step_dir(f"step-{digits}") if dash else None
