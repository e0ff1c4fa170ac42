"""The commit point: one rename gives a complete attempt the name of its step.

Called by `StepStore` with its lock on names held. Every function here lets `OSError` through.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.store.names import INFLIGHT, REPLACED, is_real_dir
from ckpt_core.store.others import keep_others
from ckpt_core.system.files import Files
from ckpt_core.types import Destination, step_dir_name

logger = logging.getLogger(__name__)

_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""EPERM: a container's filter does not know the call. Two renames ask for the same rights."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save that is being written.

    Attributes:
        id: "<step 12 digits>-<8 hex digits>", unique in its root.
        step: optimizer step that the state belongs to.
        path: its directory; a shard file or manifest is made there under its final name.
        destination: for a save of named files; None: it becomes a step.
    """

    id: str
    step: int
    path: Path
    destination: Destination | None = None

    @property
    def target_name(self) -> str:
        """What its directory is called once it is published."""
        to = self.destination
        return step_dir_name(self.step) if to is None else to.directory

    @property
    def aside(self) -> Path:
        """Where an older directory of that name waits while this one takes its place, if it has to.

        `repair` finds by this name where it belongs: it may be nobody's directory, without a manifest.
        """
        home = "" if self.destination is None else f".{self.destination.directory}"
        return self.path.with_name(f"{self.id}{home}{REPLACED}")


def sync_names(files: Files, root: Path) -> None:
    """Make every rename between the root and `.inflight` durable."""
    # Order matters where renames are not atomic on storage: a step that leaves the root gets its
    # new name before it loses the old one.
    if is_real_dir(root / INFLIGHT):
        files.sync_dir(root / INFLIGHT)
    files.sync_dir(root)


def place(files: Files, attempt: Attempt, target: Path) -> Path | None:
    """Give the attempt the name `target`, durably; what had that name before comes back as a path.

    The names are as they were before when this raises, unless undoing failed too, which is logged.
    Whatever comes back is unpublished durably: its files may be overwritten.

    Raises:
        NotADirectoryError: `target` is none, so it is not one of ours.
    """
    if is_real_dir(target):
        replaces = None if attempt.destination is None else attempt.destination.replaces
        try:
            if replaces is not None:
                keep_others(files, target, attempt.path, replaces)
            replaced = _exchange(files, attempt, target)
            if replaces is not None:
                _keep_late(files, replaced, target, replaces)
            return replaced
        except FileNotFoundError:
            # Somebody may have removed it by hand since: then the name is free.
            if is_real_dir(target) or not is_real_dir(attempt.path):
                raise
    if target.is_symlink() or target.exists():
        kind = "step" if attempt.destination is None else "directory"
        raise NotADirectoryError(
            errno.ENOTDIR, f"something that is no {kind} has that name", str(target)
        )
    _move(files, target.parent, [(attempt.path, target)])
    return None


def _keep_late(files: Files, replaced: Path, target: Path, replaces: Sequence[str]) -> None:
    """Keep what others have put there while the names were exchanged. The save is published: never raises."""
    try:
        keep_others(files, replaced, target, replaces)
    except OSError as exc:
        logger.warning("what was put into %s while it was replaced may be gone: %s", target, exc)


def _exchange(files: Files, attempt: Attempt, target: Path) -> Path:
    try:
        files.exchange(attempt.path, target)
    except OSError as exc:
        if exc.errno not in _NO_EXCHANGE:
            raise
        return _replace(files, attempt, target)
    try:
        sync_names(files, target.parent)
    except OSError:
        _undo_exchange(files, attempt, target)
        raise
    return attempt.path


def _replace(files: Files, attempt: Attempt, target: Path) -> Path:
    """The same in two renames. Killed between them, the step is found again by `repair`."""
    aside = attempt.aside
    _move(files, target.parent, [(target, aside)])
    try:
        _move(files, target.parent, [(attempt.path, target)])
    except OSError:
        _undo(files, target.parent, [(target, aside)])
        raise
    return aside


def put_back(files: Files, attempt: Attempt, target: Path) -> None:
    """Undo what `_replace` could not undo: called before a failed attempt is deleted."""
    if is_real_dir(attempt.aside) and not target.exists():
        files.rename(attempt.aside, target)


def _move(files: Files, root: Path, moves: Sequence[tuple[Path, Path]]) -> None:
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            files.rename(source, target)  # Commit point, when the target is a step's name.
            done.append((source, target))
        sync_names(files, root)
    except OSError:
        _undo(files, root, done)
        raise


def _undo(files: Files, root: Path, moves: Sequence[tuple[Path, Path]]) -> None:
    try:
        for source, target in reversed(moves):
            files.rename(target, source)
        if moves:
            sync_names(files, root)
    except OSError as exc:
        logger.error("could not undo a failed publish in %s: %s; reopening repairs it", root, exc)


def _undo_exchange(files: Files, attempt: Attempt, target: Path) -> None:
    try:
        files.exchange(attempt.path, target)
        sync_names(files, target.parent)
    except OSError as exc:
        logger.error("could not undo a failed publish of %s: %s", target, exc)
