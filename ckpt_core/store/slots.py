"""Shard files of retired steps, blocks still allocated, that the next saves overwrite in place.

Overwriting allocated blocks is faster than writing new ones, and it bounds the storage that a root
takes. Source: PCcheck (ASPLOS '25) section 4.1, the queue of free slots.

Invariant: no byte changes that anybody can read as one of a step. Whoever opened or mapped a file by the
name that it had in its step may keep it for ever, so it is overwritten only if the kernel says, once it has
lost every name of that step, that nobody has it. Otherwise it is deleted: its readers keep it.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.layout import parse_shard_name
from ckpt_core.store.names import SLOTS, entries, is_real_dir
from ckpt_core.store.trees import ensure_dir, remove_each
from ckpt_core.system.files import Files
from ckpt_core.system.kept_mappings import KeptMappings
from ckpt_core.system.threads import own_lock

logger = logging.getLogger(__name__)

_FOR = "for-"
"""Before the rank that has a slot mapped, perhaps, and that alone takes it."""
_TAKEN = ".taken"
"""Of a slot that one rank has taken and not yet asked about; `trim` deletes what a killed one leaves."""


@dataclass(frozen=True, slots=True)
class _Slot:
    path: Path
    nbytes: int
    blocks_bytes: int


class Slots:
    """The `.slots` directory of one root. Thread-safe; the caller holds the root's lock, or only takes.

    Args:
        spare: how many files are kept; None, by hand: those that wait for the next training job, and no more.
        shared: other processes take slots as well.
        rank: of this process.
        kept: what this process has mapped of the root.
    """

    def __init__(
        self,
        root: Path,
        *,
        files: Files,
        spare: int | None,
        shared: bool = False,
        rank: int = 0,
        kept: KeptMappings | None = None,
    ) -> None:
        self.path = root / SLOTS
        self._files = files
        self._kept = kept or KeptMappings(files=files, most=0)
        self._spare = spare
        self._mutex = own_lock()
        self._taken = self._shared = shared
        self._rank = rank

    def reusable_bytes(self, sizes: Sequence[int]) -> int:
        """How much of files of these sizes would go to blocks that are allocated already, taken in turn."""
        slots, found = self._usable(), 0
        for nbytes in sizes:
            slot = _best(slots, nbytes)
            if slot is not None:
                slots.remove(slot)
                found += min(nbytes, slot.nbytes, slot.blocks_bytes)
        return found

    def next_for(self, nbytes: int) -> Path | None:
        """The slot that a file of so many bytes would get now; None where that cannot be told."""
        try:
            slot = _best(self._usable(), nbytes)
        except OSError:
            return None
        return None if slot is None else slot.path

    def take(self, target: Path, nbytes: int) -> bool:
        """Give the best fitting slot the name `target`; False when there is none or it fails.

        The name leaves `.slots` durably with the next sync of that directory: the caller syncs it
        before it publishes, so that a file of a committed step is never a slot as well.
        """
        try:
            with self._mutex:
                while (slot := _best(self._usable(), nbytes)) is not None:
                    if os.path.lexists(target):
                        return False
                    self._taken = True
                    if self._move(slot.path, target):
                        return True
                return False
        except OSError as exc:
            logger.warning("no recycled file for %s: %s; writing a new one", target, exc)
            return False

    def _move(self, slot: Path, target: Path) -> bool:
        """Make a slot the file `target`; False when it is none any more, and it is time for the next one."""
        mine = slot.with_suffix(_TAKEN)
        try:
            self._files.rename(slot, mine)
        except FileNotFoundError:
            if os.path.lexists(slot):
                raise
            return False  # another rank was faster
        # Order matters: asked when no other rank looks at it, and none of its step's names is left by
        # which a reader could still come to it.
        if not self._is_free(mine):
            self._files.unlink(mine)
            return False
        try:
            self._files.rename(mine, target)
        except OSError:
            self._files.rename(mine, slot)
            raise
        return True

    def _is_free(self, path: Path) -> bool:
        return _slot(path) is not None and self._kept.is_unused(path)

    def sync(self) -> None:
        """Make it durable that the slots taken so far are slots no more."""
        if self._taken and is_real_dir(self.path):
            self._files.sync_dir(self.path)

    def give(self, path: Path) -> bool:
        """Keep a shard file that nobody needs any more; False when it is to be deleted instead.

        One that has a reader is: its space comes back when the reader ends, not at the next save. Where the
        rank that wrote it has it mapped, that one alone can tell, before it takes it.
        """
        name = secrets.token_hex(8)
        with self._mutex:
            if self._spare is None or _slot(path) is None or len(self._all()) >= self._spare:
                return False
            writer = parse_shard_name(path.name)
            if self._shared and writer is not None and self._kept.keeps(self.path.parent):
                name = f"{_FOR}{writer[0]}-{name}"
            elif not self._is_free(path):
                return False
            ensure_dir(self._files, self.path)
            self._files.rename(path, self.path / name)
            return True

    def trim(self) -> None:
        """Delete what cannot be a slot, and the smallest beyond the number to keep.

        Those that are left are for any rank: whoever had one mapped has ended.

        Raises:
            OSError: something could not be deleted; all that can be has been.
        """
        with self._mutex:
            slots = sorted(self._all(), key=lambda slot: slot.nbytes, reverse=True)
            kept = {slot.path.name for slot in slots[: self._spare]}
            there = [Path(entry.path) for entry in entries(self.path)]
            for path in there:
                if path.name in kept and path.name.startswith(_FOR):
                    self._files.rename(path, self.path / secrets.token_hex(8))
            remove_each(self._files, [path for path in there if path.name not in kept])

    def _usable(self) -> list[_Slot]:
        """Those that this rank may take."""
        mine = f"{_FOR}{self._rank}-"
        return [
            slot
            for slot in self._all()
            if not slot.path.name.startswith(_FOR) or slot.path.name.startswith(mine)
        ]

    def _all(self) -> list[_Slot]:
        paths = [Path(entry.path) for entry in entries(self.path)]
        found = [_slot(path) for path in paths if path.suffix != _TAKEN]
        return [slot for slot in found if slot is not None]


def _best(slots: Sequence[_Slot], nbytes: int) -> _Slot | None:
    """The smallest slot that is large enough, else the largest."""
    return min(slots, key=lambda s: (s.nbytes < nbytes, abs(s.nbytes - nbytes)), default=None)


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
