"""What `open` does about the traces of a kill or a power loss.

The states that a root can be found in, and what becomes of each:

    .inflight/<attempt>             never committed, or a step that was replaced       deleted
    .inflight/<attempt>.replaced    step there: it was replaced                        deleted
                                    step missing: killed between the two renames, or
                                    before it was decided that it is retired           renamed back
    .inflight/<attempt>.<directory>.replaced    the same for a directory of files
    .inflight/<attempt>.pointer     a pointer that was not moved yet                   deleted
    .inflight/<name>.retired        unpublished, perhaps half recycled                 deleted
    .slots/*                        more than allowed, or not a recyclable file        deleted

Every part can be killed at any operation and be run again. Nothing outside these directories is
touched, and no symbolic link is followed.
"""

from __future__ import annotations

import logging
import os
import secrets
from functools import partial
from pathlib import Path

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.layout import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, is_directory_name
from ckpt_core.store.names import INFLIGHT, REPLACED, RETIRED, entries, is_real_dir
from ckpt_core.store.publish import sync_names
from ckpt_core.store.slots import Slots
from ckpt_core.store.trees import remove_each
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir, step_dir_name

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
        bring_back(root, files=files)
    troubles = []
    for clear in (partial(_clear, root, files=files), slots.trim):
        try:
            clear()
        except OSError as exc:
            troubles.append(str(exc))
    if troubles:
        text = "could not clear leftovers in %s: %s; they take space only"
        logger.warning(text, root, "; ".join(troubles))


def _clear(root: Path, *, files: Files) -> None:
    # Order matters: what was replaced is half deleted after a kill, or stays where it cannot be deleted. Its
    # successor may go meanwhile: a directory by hand.
    give_up_replaced(root, files=files)
    remove_each(files, [Path(entry.path) for entry in entries(root / INFLIGHT)])


def bring_back(root: Path, *, files: Files) -> None:
    """Give what was being replaced or retired its name again, durably, where nothing else has it.

    Called with the root's lock held.

    Raises:
        OSError: not everything has its name.
    """
    moved = False
    for path in _replaced(root):
        home = root / _home_name(path.name)
        if os.path.lexists(home):
            continue
        files.rename(path, home)
        logger.warning(
            "%s was being replaced or retired when its writer ended: brought it back", home.name
        )
        moved = True
    if moved:
        files.sync_dir(root)
        files.sync_dir(root / INFLIGHT)


def give_up_replaced(root: Path, *, files: Files) -> list[Path]:
    """Have nothing that was replaced ever come back, durably; where it lies now.

    Called behind `bring_back`, with the root's lock still held: whatever that has left there has a successor,
    or is nothing whole.

    Raises:
        OSError: not all of it is given up.
    """
    given_up = []
    for path in [Path(entry.path) for entry in entries(root / INFLIGHT)]:
        if path.name.endswith(REPLACED):
            gone = path.with_name(f"{secrets.token_hex(8)}{RETIRED}")
            files.rename(path, gone)
            given_up.append(gone)
    if given_up:
        files.sync_dir(root / INFLIGHT)
    return given_up


def _replaced(root: Path) -> list[Path]:
    """What was moved aside and has a name to go back to, newest first."""
    paths = [Path(entry.path) for entry in entries(root / INFLIGHT)]
    known = [path for path in paths if _home_name(path.name) and _is_whole(path)]
    return sorted(known, key=_age, reverse=True)


def _home_name(name: str) -> str:
    """Which name in the root a directory had that was moved aside as `name`; "" if none."""
    attempt, _, directory = name.removesuffix(REPLACED).partition(".")
    step = step_of_attempt(attempt)
    if step is None or not name.endswith(REPLACED):
        return ""
    if directory:
        return directory if is_directory_name(directory) else ""
    return step_dir_name(step)


def _age(path: Path) -> int:
    """When it was written; the oldest of all if others wrote it."""
    try:
        return (path / MANIFEST_NAME).lstat().st_mtime_ns
    except OSError:
        return 0


def _is_whole(path: Path) -> bool:
    if parse_step_dir(_home_name(path.name)) is None:
        # Perhaps others' files: it is what had that name, and was renamed as a whole.
        return is_real_dir(path)
    manifest = path / MANIFEST_NAME
    if manifest.is_symlink() or not manifest.is_file():
        return False
    if manifest.stat().st_size > MAX_MANIFEST_BYTES:
        return False
    try:
        found = Manifest.decode(manifest.read_bytes(), path=manifest)
    except UnknownFormat:
        return True  # A newer release wrote it, and moved it here by the same rule.
    except CorruptCheckpoint:
        return False
    return found.directory is None and found.step == step_of_attempt(path.name)


def step_of_attempt(name: str) -> int | None:
    """The step of "<step 12 digits>-<8 hex digits>...", or None when it is no such name."""
    digits, dash, _ = name.partition("-")
    return parse_step_dir(f"step-{digits}") if dash else None
