"""Shard files of retired steps, blocks still allocated, that the next saves overwrite in place.

Overwriting allocated blocks is faster than writing new ones, and it bounds the storage that a root
takes. Source: PCcheck (ASPLOS '25) section 4.1, the queue of free slots.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.files import Files
from ckpt_core.store.names import SLOTS, entries, is_real_dir
from ckpt_core.store.trees import ensure_dir, remove_tree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Slot:
    path: Path
    nbytes: int
    blocks_bytes: int


class Slots:
    """The `.slots` directory of one root. Thread-safe; the caller holds the root's lock, or only takes.

    Args:
        spare: how many files are kept.
        shared: other processes take slots as well.
    """

    def __init__(self, root: Path, *, files: Files, spare: int, shared: bool = False) -> None:
        self.path = root / SLOTS
        self._files = files
        self._spare = spare
        self._mutex = threading.Lock()
        self._taken = shared

    def reusable_bytes(self, nbytes: int) -> int:
        """How much of a file of `nbytes` would go to blocks that are allocated already."""
        slot = self._best(nbytes)
        return 0 if slot is None else min(nbytes, slot.nbytes, slot.blocks_bytes)

    def take(self, target: Path, nbytes: int) -> bool:
        """Give the best fitting slot the name `target`; False when there is none or it fails.

        The name leaves `.slots` durably with the next sync of that directory: the caller syncs it
        before it publishes, so that a file of a committed step is never a slot as well.
        """
        try:
            with self._mutex:
                while (slot := self._best(nbytes)) is not None:
                    if os.path.lexists(target):
                        return False
                    self._taken = True
                    try:
                        self._files.rename(slot.path, target)
                        return True
                    except FileNotFoundError:
                        if os.path.lexists(slot.path):
                            raise  # the attempt's directory is gone
                        # Another rank was faster: take the next one.
                return False
        except OSError as exc:
            logger.warning("no recycled file for %s: %s; writing a new one", target, exc)
            return False

    def sync(self) -> None:
        """Make it durable that the slots taken so far are slots no more."""
        if self._taken and is_real_dir(self.path):
            self._files.sync_dir(self.path)

    def give(self, path: Path) -> bool:
        """Keep a shard file that nobody needs any more; False when it is to be deleted instead."""
        with self._mutex:
            if _slot(path) is None or len(self._all()) >= self._spare:
                return False
            ensure_dir(self._files, self.path)
            self._files.rename(path, self.path / secrets.token_hex(8))
            return True

    def trim(self) -> None:
        """Delete what cannot be a slot, and the smallest beyond the number to keep."""
        with self._mutex:
            slots = sorted(self._all(), key=lambda slot: slot.nbytes, reverse=True)
            kept = {slot.path.name for slot in slots[: self._spare]}
            for entry in entries(self.path):
                if entry.name not in kept:
                    remove_tree(self._files, Path(entry.path))

    def _best(self, nbytes: int) -> _Slot | None:
        """The smallest slot that is large enough, else the largest."""
        slots = self._all()
        return min(slots, key=lambda s: (s.nbytes < nbytes, abs(s.nbytes - nbytes)), default=None)

    def _all(self) -> list[_Slot]:
        found = (_slot(Path(entry.path)) for entry in entries(self.path))
        return [slot for slot in found if slot is not None]


def _slot(path: Path) -> _Slot | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    # A second hard link is a copy that a user made: overwriting in place would destroy it.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size == 0:
        return None
    if not os.access(path, os.R_OK | os.W_OK):
        return None
    return _Slot(path, found.st_size, found.st_blocks * 512)
