"""Words of a level that is a directory, and a lock for a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ckpt_core.errors import RootBusy
from ckpt_core.levels.far.door import Away, Conflict, Word
from ckpt_core.levels.far.looking import read_whole
from ckpt_core.levels.mailbox import LEVELS
from ckpt_core.store import RootLock, ensure_dir
from ckpt_core.system.files import Files

_LOCKS = ".words"
"""A folder of its own: the lock of `.levels` itself is the agent's."""

_MOST_BYTES = 1 << 20
_WAIT_S = 10.0
_LOOK_AGAIN_S = (0.005, 0.05)


@contextmanager
def held(lock: RootLock, *, busy_s: float, url: str) -> Iterator[None]:
    """Hold a lock that everybody holds for a moment only, and wait for it that long.

    Raises:
        Away: somebody has it all the time; the text says who.
    """
    deadline = time.monotonic() + busy_s
    while True:
        try:
            lock.acquire()
            break
        except RootBusy as exc:
            if time.monotonic() >= deadline:
                raise Away(f"{url}: {exc}") from exc
        time.sleep(random.SystemRandom().uniform(*_LOOK_AGAIN_S))
    try:
        yield
    finally:
        lock.release()


class Words:
    """Small files in `.levels/` of a root, each written by whoever has seen what it replaces."""

    def __init__(self, root: Path, *, files: Files, busy_s: float = _WAIT_S) -> None:
        self._folder, self._busy_s = root / LEVELS, busy_s
        self._files = files

    def read(self, name: str) -> Word | None:
        """As `Far.read_word`. Raises OSError."""
        data = read_whole(self._folder / name, _MOST_BYTES, files=self._files)
        return None if data is None else Word(data, _tag(data))

    def write(self, name: str, data: bytes, *, over: str | None) -> str:
        """As `Far.write_word`; the root is there. Raises OSError."""
        locks = self._folder / _LOCKS
        ensure_dir(self._files, self._folder)
        ensure_dir(self._files, locks)
        url = str(self._folder)
        with held(RootLock(locks, files=self._files), busy_s=self._busy_s, url=url):
            there = self.read(name)
            if (None if there is None else there.tag) != over:
                raise Conflict(f"{self._folder / name} was written by somebody else meanwhile")
            self._replace(name, data)
        return _tag(data)

    def _replace(self, name: str, data: bytes) -> None:
        # Always the same name: there is one writer, who takes away what a kill has left of the one before.
        fresh = self._folder / f".{name}.new"
        with suppress(FileNotFoundError):
            self._files.unlink(fresh)
        try:
            self._files.write_new(fresh, data)
            self._files.rename(fresh, self._folder / name)
        except OSError:
            with suppress(OSError):
                self._files.unlink(fresh)
            raise
        self._files.sync_dir(self._folder)


def _tag(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
