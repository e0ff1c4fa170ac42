"""Mappings of files in memory, kept from the save that wrote a file to the one that overwrites it.

A file on tmpfs in pages of 4 KiB takes a fault for each of them whenever it is mapped anew, which costs more
than the copy; written by calls, it is one copy more, and its writers take turns at the lock of the inode. A
mapping that stays has neither: the file of a step that has become a slot is memory like any other.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.system.files import Files
from ckpt_core.system.pages import touch_view
from ckpt_core.system.threads import own_lock

_TOUCH_BYTES = 8 * 2**20
_BLOCK_BYTES = 512
"""In which `st_blocks` counts."""

_opened: weakref.WeakSet[KeptMappings] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class KeptMapping:
    """A file that is open and mapped, writable and whole.

    Attributes:
        fd: by which it was mapped: the kernel grants a lease by this one alone.
        touched_bytes: from its begin on no page has a fault any more.
    """

    fd: int
    memory: mmap.mmap
    touched_bytes: int = 0

    @property
    def is_warm(self) -> bool:
        """Whether none of its pages has a fault any more."""
        return self.touched_bytes >= len(self.memory)

    def holds(self, nbytes: int) -> bool:
        """Whether it is a file of that length, all of whose pages are there: writing takes no more memory,
        and cannot end in SIGBUS unless somebody cuts the file meanwhile."""
        found = os.fstat(self.fd)
        there = found.st_blocks * _BLOCK_BYTES
        return found.st_size == nbytes == len(self.memory) and there >= nbytes


class KeptMappings:
    """Those of one root's shard files. Thread-safe.

    Invariant: whoever has taken one is the only one who writes there; the others belong to committed steps,
    or to slots, and are not touched but for their page tables.

    Args:
        most: how many are kept, the longest kept one going first; 0: none ever is.
    """

    def __init__(self, *, files: Files, most: int) -> None:
        self._files = files
        self._most = most
        self._mutex = own_lock()
        self._kept: dict[tuple[int, int], KeptMapping] = {}
        self._keeps: bool | None = None
        _opened.add(self)

    def keeps(self, directory: Path) -> bool:
        """Whether files are kept that lie there: in memory, in pages so small that it pays. Asked once."""
        if self._keeps is None:
            files = self._files
            self._keeps = files.in_memory(directory) and not files.in_huge_pages(directory)
        return self._keeps and self._most > 0

    @property
    def has_any(self) -> bool:
        """Whether one is kept now."""
        return bool(self._kept)

    def keep(self, fd: int, nbytes: int, memory: mmap.mmap | None, *, warm: bool = False) -> bool:
        """Take over the descriptor of a whole file that is written, and its mapping where it has one.

        False where it is not to be kept: the descriptor stays the caller's.

        Args:
            warm: all of it, or all but a little, was written through the mapping.
        """
        try:
            fresh = self._files.map_shared(fd, nbytes) if memory is None else memory
            made = KeptMapping(fd, fresh, nbytes if warm else 0)
            if not made.holds(nbytes):
                return False
            key = _key(os.fstat(fd))
        except (OSError, ValueError):  # somebody has cut it
            return False
        with self._mutex:
            if not self._most:
                return False
            self._kept[key] = made
            oldest = list(self._kept)[: -self._most]
            dropped = [self._kept.pop(one) for one in oldest]
        self._close(dropped)
        return True

    def take(self, path: Path, nbytes: int) -> KeptMapping | None:
        """The mapping of a file that is to be overwritten by as many bytes; it is kept no more.

        None where it has none, or is none any more that can be overwritten without growing.
        """
        with self._mutex:
            found = self._kept.pop(_key_of(path), None)
        if found is not None and not found.holds(nbytes):
            self._close([found])
            return None
        return found

    def is_unused(self, path: Path) -> bool:
        """As `Files.is_unused`, but for the mapping that is kept here."""
        with self._mutex:
            # Held meanwhile: the descriptor must not be closed, and its number be another file's.
            found = self._kept.get(_key_of(path))
            if found is not None:
                return self._files.is_lone(found.fd)
        return self._files.is_unused(path)

    def is_warm(self, path: Path | None, nbytes: int) -> bool:
        """Whether a file can be overwritten by as many bytes without a fault. A guess: it may be taken."""
        found = None if path is None else self._kept.get(_key_of(path))
        try:
            return found is not None and found.is_warm and found.holds(nbytes)
        except OSError:
            return False  # taken, and closed

    def touch_ahead(self) -> bool:
        """Touch some more of a mapping that is not warm; False when all are. Called on one thread."""
        with self._mutex:
            found = next((one for one in self._kept.values() if not one.is_warm), None)
        if found is None:
            return False
        start = found.touched_bytes
        touch_view(memoryview(found.memory)[start : start + _TOUCH_BYTES])
        found.touched_bytes = start + _TOUCH_BYTES
        return True

    def drop_gone(self) -> None:
        """Let go of files that have lost their last name: their memory goes with them."""
        with self._mutex:
            gone = [key for key, one in self._kept.items() if not os.fstat(one.fd).st_nlink]
            dropped = [self._kept.pop(key) for key in gone]
        self._close(dropped)

    def close(self) -> None:
        """Let go of all, and keep none any more. Idempotent."""
        with self._mutex:
            self._most, dropped = 0, list(self._kept.values())
            self._kept = {}
        self._close(dropped)

    def _close(self, dropped: list[KeptMapping]) -> None:
        # The mapping goes with its last reference: whoever touches its pages may still have one.
        for one in dropped:
            self._files.close(one.fd)

    def forget(self) -> None:
        """In a forked child: the parent's files are not held by it, so that their memory can come back."""
        kept, self._kept, self._most = self._kept, {}, 0
        for one in kept.values():
            with suppress(OSError, BufferError):
                os.close(one.fd)
                one.memory.close()


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _key_of(path: Path) -> tuple[int, int]:
    """Of a file; of nothing where there is none."""
    try:
        return _key(os.lstat(path))
    except OSError:
        return 0, 0


def _after_fork() -> None:
    for one in list(_opened):
        one.forget()


os.register_at_fork(after_in_child=_after_fork)
