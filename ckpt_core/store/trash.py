"""Directories of unpublished steps, on their way to become slots or nothing."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from ckpt_core.layout import parse_shard_name
from ckpt_core.store.names import RETIRED, entries
from ckpt_core.store.slots import Slots
from ckpt_core.store.trees import remove_tree
from ckpt_core.system.files import Files
from ckpt_core.system.threads import own_lock

logger = logging.getLogger(__name__)


class Trash:
    """What is still to be recycled or deleted. A path whose deletion fails is tried again later.

    Call order: `add`, sync the names, `take`, `discard`. Nothing may be added between the sync and
    `take`, so the owner holds its lock on names over these; `discard` runs without it, as deleting
    large files takes long.
    """

    def __init__(self, files: Files, *, slots: Slots) -> None:
        self._files = files
        self._slots = slots
        self._paths: list[tuple[Path, bool]] = []
        self._mutex = own_lock()

    def __bool__(self) -> bool:
        return bool(self._paths)

    def add(self, path: Path, *, recycle: bool) -> None:
        """Hand over a directory that has no step's name any more."""
        with self._mutex:
            self._paths.append((path, recycle))

    def take(self) -> list[tuple[Path, bool]]:
        """Everything that was added; the caller has made the loss of their names durable."""
        with self._mutex:
            paths, self._paths = self._paths, []
            return paths

    def discard(self, paths: list[tuple[Path, bool]]) -> None:
        """Recycle shard files and delete the rest. Trouble costs only space, and is only logged."""
        for path, recycle in paths:
            gone = path
            try:
                gone = self._retired(path)
                self._discard(gone, recycle=recycle)
            except FileNotFoundError:
                logger.warning("%s was removed by somebody else", gone)
            except OSError as exc:
                logger.warning("could not delete %s: %s; trying again later", gone, exc)
                self.add(gone, recycle=False)

    def _retired(self, path: Path) -> Path:
        # A replaced step has a name that `repair` brings back: it loses it before its files go.
        if path.suffix == RETIRED:
            return path
        gone = path.with_name(f"{path.stem}-{secrets.token_hex(4)}{RETIRED}")
        self._files.rename(path, gone)
        return gone

    def _discard(self, path: Path, *, recycle: bool) -> None:
        for entry in entries(path) if recycle else ():
            if parse_shard_name(entry.name) is not None:
                self._slots.give(Path(entry.path))
        remove_tree(self._files, path)
