"""`HeldRoot`: a root is made and locked before it is written to, and anew where it was removed meanwhile."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.store.disk import Disk
from ckpt_core.store.failures import mapped
from ckpt_core.store.lock import RootLock
from ckpt_core.store.names import committed_steps
from ckpt_core.store.trees import ensure_root
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)


class HeldRoot:
    """The right to write to a root, from `enter` to `leave`. Writes nothing before.

    Args:
        root: with links resolved.
        names: held while names in the root change.

    Attributes:
        lock: the root's.
    """

    def __init__(self, root: Path, *, files: Files, names: threading.RLock) -> None:
        self._root, self._files, self._names = root, files, names
        self._is_entered = False
        self._disk = Disk(root)
        self.lock = RootLock(root, files=files)

    def enter(self) -> None:
        """Make the root if it is missing, and take its lock.

        Raises:
            ConfigError: it is no directory.
            RootBusy: somebody else writes to it.
            PersistError: it cannot be made or locked.
        """
        self._take()
        self._is_entered = True

    def check(self) -> None:
        """Be sure that the root is still ours, before anything in it is changed.

        Raises:
            ConfigError: it was left, or never entered.
            RootBusy, PersistError: it was removed under us, and could not be taken anew.
            PersistError: its disk is not in its place, or whether it is ours cannot be told now; its lock
                is kept.
        """
        if not self._is_entered:
            raise ConfigError(f"the store of {self._root} is closed", path=self._root)
        if self._is_held():
            return
        with self._names:
            if self._is_held():
                return  # another thread was faster
            self._disk.check(self.lock.is_signed)
            self.lock.release()
            self._take()
            logger.warning(
                "%s or its lock file was removed while it was in use; made it anew and locked it. "
                "Steps that were removed with it are gone: %d are there now",
                self._root,
                len(committed_steps(self._root)),
            )

    def leave(self) -> None:
        """Give the lock back. Idempotent, never raises, changes nothing on storage."""
        self._is_entered = False
        self.lock.release()

    def _is_held(self) -> bool:
        with mapped("look at the lock of the checkpoint root", path=self._root):
            return self.lock.held()

    def _take(self) -> None:
        with mapped("open the checkpoint root", path=self._root):
            if os.path.lexists(self._root) and not self._root.is_dir():
                raise ConfigError(
                    f"root={self._root} is no directory: name another", path=self._root
                )
            ensure_root(self._files, self._root)
            # Order matters: what fails behind the lock would leave it with nobody.
            self._disk.note()
        self.lock.acquire()
