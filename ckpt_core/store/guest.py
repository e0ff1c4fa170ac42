"""`GuestStore`: what a rank that does not lead may do in a root that it shares.

It writes its own files into attempts. Locking, repair, publishing and retention are the leader's: a guest
that is killed leaves files in an attempt that is never published, and the leader removes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.layout import rank_manifest_name
from ckpt_core.store.disk import Disk
from ckpt_core.store.failures import mapped
from ckpt_core.store.kept import Hold
from ckpt_core.store.lock import owner_of
from ckpt_core.store.names import INFLIGHT, committed_steps, entries
from ckpt_core.store.publish import Attempt
from ckpt_core.store.slots import Slots
from ckpt_core.store.space import check_space
from ckpt_core.store.trees import ensure_dir, find_root
from ckpt_core.system.files import Files
from ckpt_core.system.kept_mappings import KeptMappings
from ckpt_core.types import Destination, check_step

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1


class GuestStore:
    """The root of a rank that does not lead. Thread-safe. Same calls as `StepStore`, where they apply."""

    def __init__(
        self, root: Path, *, files: Files, rank: int, kept: KeptMappings | None = None
    ) -> None:
        self.root = find_root(root)
        self._files = files
        self._rank = rank
        self._disk = Disk(self.root)
        self._owner: dict[str, Any] = {}
        self._slots = Slots(self.root, files=files, spare=0, shared=True, rank=rank, kept=kept)

    def find_leader(self, owner: dict[str, Any], *, leader: int, timeout_s: float) -> None:
        """Be sure that the leader's root is this one; network filesystems may need a moment.

        Args:
            owner: what the leader's lock file says.

        Raises:
            ConfigError: it is not.
            PersistError: it cannot be looked at.
        """
        deadline = time.monotonic() + timeout_s
        while owner_of(self.root) != owner:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"root={self.root} of rank {self._rank} is not the directory that rank {leader} has "
                    f"opened: all ranks that share a root must see the same one. If each node has a "
                    f"disk of its own, say so: TorchStore.from_env(roots='node')",
                    path=self.root,
                )
            time.sleep(_LOOK_AGAIN_S)
            for folder in (self.root.parent, self.root):
                # A client of NFS asks the server again about names in a directory that is opened.
                with contextlib.suppress(OSError):
                    os.scandir(folder).close()
        self._owner = owner
        with mapped("look at the checkpoint root", path=self.root):
            self._disk.note()

    def begin(self, step: int, attempt_id: str, destination: Destination | None = None) -> Attempt:
        """The directory of an attempt; whichever rank comes first makes it.

        Raises:
            PersistError: it cannot be made, or the root's disk is not in its place.
        """
        step = check_step(step)
        self._disk.check(lambda: owner_of(self.root) == self._owner)
        path = self.root / INFLIGHT / attempt_id
        with mapped("begin a save", path=self.root, step=step):
            ensure_dir(self._files, path.parent)
            ensure_dir(self._files, path)
        return Attempt(attempt_id, step, path, destination)

    def next_slot(self, nbytes: int) -> Path | None:
        """As `StepStore.next_slot`."""
        return self._slots.next_for(nbytes)

    def take_slot(self, attempt: Attempt, name: str, nbytes: int) -> bool:
        """As `StepStore.take_slot`."""
        return self._slots.take(attempt.path / name, nbytes)

    def check_space(self, *sizes: int, others_bytes: int = 0) -> None:
        """As `StepStore.check_space`, for the files of this rank alone.

        Raises:
            PersistError: the free space is too small.
        """
        check_space(self.root, sizes, others_bytes, slots=self._slots, files=self._files)

    def abandon(self, attempt: Attempt, made: Iterable[Path] = ()) -> None:
        """Delete this rank's files of a failed attempt, and its directory if nothing else is in it.

        Best effort: never raises. Not called while the attempt may still be published.

        Args:
            made: named files, which do not tell whose they are.
        """
        folders: set[Path] = set()
        for path in made:
            folders |= {one for one in path.parents if attempt.path in one.parents}
            with contextlib.suppress(OSError):
                self._files.unlink(path)
        for folder in sorted(folders, reverse=True):
            with contextlib.suppress(OSError):
                self._files.rmdir(folder)
        mine = (f"shard-{self._rank:05d}-", rank_manifest_name(self._rank))
        with contextlib.suppress(OSError):
            for entry in entries(attempt.path):
                if entry.name.startswith(mine):
                    self._files.unlink(Path(entry.path))
            self._files.rmdir(attempt.path)

    def steps(self) -> tuple[int, ...]:
        """The committed steps, ascending."""
        return committed_steps(self.root)

    # -- what the leader does for all ------------------------------------------------------------

    def admitted(self, attempt_id: str) -> None:
        """The leader's."""

    def gone_back(self) -> None:
        """The leader's."""

    def quarantine_suspects(self) -> None:
        """The leader's."""

    def retire(self) -> tuple[int, ...]:
        """The leader's."""
        return ()

    def protect(self, step: int) -> Hold:
        """The leader retires nothing while ranks restore: saves come after."""
        return Hold(step)

    def suspect(self, step: int) -> None:
        """The leader restores the same step, and hears what other ranks found in it."""

    def pin(self, step: int) -> None:
        """The leader's."""

    def unpin(self, step: int) -> None:
        """The leader's."""

    def close(self) -> None:
        """Nothing is held."""
