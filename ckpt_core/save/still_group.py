"""The leaves of one still file, and that file in the newest committed step that has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckpt_core.options import Options
from ckpt_core.persist import HeldFile, ShardFile
from ckpt_core.system.threads import own_lock

_log = logging.getLogger("ckpt_core")

_CHECK_EVERY = 10
"""Declared leaves are read at one save in so many."""


@dataclass(frozen=True, slots=True)
class Rebase:
    """When a file is written anew though nothing in it has changed.

    Attributes:
        steps: most that share one.
        seconds: from the commit of the first of them on, in which others may still share it; None: no bound.
    """

    steps: int
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, options: Options) -> Rebase:
        """What the options ask for."""
        return cls(options.rebase_every, options.rebase_after_s)

    def is_due(self, steps: int, since: float) -> bool:
        """Whether a file is old enough that so many steps have, the first of which was committed then."""
        late = self.seconds is not None and self.clock() - since >= self.seconds
        return late or steps >= self.steps


@dataclass(frozen=True, slots=True)
class Loan:
    """What a save may do with the file of an earlier step.

    Attributes:
        file: that file; the shard of the save has it as `earlier`.
        trusted: it is shared unread.
        renew: it has been shared often or long enough: what was declared is looked at, and written again.
    """

    file: HeldFile
    trusted: bool
    renew: bool


class Keeper(Protocol):
    """Who has the file that later saves may share."""

    def committed(self, shard: ShardFile, step: Path, look: Mapping[str, bytes]) -> None:
        """See `StillGroup.committed`."""

    def forget(self) -> None:
        """See `StillGroup.forget`."""


class StillGroup:
    """The leaves of one still file, and that file in the newest committed step. Thread-safe.

    Args:
        names: of the leaves.
        declared: the user says that they never change.
        rebase: when the file is written anew.
    """

    def __init__(self, names: Collection[str], *, declared: bool, rebase: Rebase) -> None:
        self.names = frozenset(names)
        self.declared = declared
        self._rebase = rebase
        self._lock = own_lock()
        self._file: HeldFile | None = None
        self._looked: Mapping[str, bytes] = {}
        self._steps, self._since = 0, 0.0
        self._unread = 0
        self._closed = False

    def lend(self, shard: ShardFile) -> Loan | None:
        """Let a save have the file, as its shard's `earlier`; None where there is none.

        None, too, where somebody has changed it: the save writes its own.
        """
        self._drop_changed()
        with self._lock:
            if self._file is None or self._file.nbytes != shard.request.file_bytes:
                return None
            renew = self._rebase.is_due(self._steps, self._since)
            if renew and not self.declared:
                return None
            shard.earlier = self._file.take()
            trusted = self.declared and not renew and self._unread < _CHECK_EVERY - 1
            self._steps += 1
            self._unread = self._unread + 1 if trusted else 0
            return Loan(self._file, trusted, renew)

    def _drop_changed(self) -> None:
        with self._lock:
            file = self._file
            if file is None or file.is_as_written():
                return
            self._file = None
        _log.warning(
            "somebody has changed %s since it was written: the steps that have it are likely damaged, which "
            "`ckpt-core verify` tells. This save writes its own",
            file.home,
        )
        file.release()

    def unlike(self, look: Mapping[str, bytes]) -> list[str]:
        """Leaves that do not look as they did when the file was written."""
        with self._lock:
            return [name for name, now in look.items() if self._looked.get(name, now) != now]

    def committed(self, shard: ShardFile, step: Path, look: Mapping[str, bytes]) -> None:
        """The file of a save is one of a committed step, in that directory.

        Args:
            look: how leaves looked at that save.
        """
        file = shard.earlier if shard.is_shared else shard.held
        if file is None:
            return
        file.home = step / shard.request.name
        if not shard.is_shared:
            self._adopt(file, look)

    def _adopt(self, file: HeldFile, look: Mapping[str, bytes]) -> None:
        with self._lock:
            if self._closed:
                return
            old, self._file, self._looked = self._file, file.take(), look
            self._steps, self._unread, self._since = 1, 0, self._rebase.clock()
        if old is not None:
            old.release()

    def forget(self, *, closed: bool = False) -> None:
        """Let go of the file: the next save writes its own. Idempotent.

        Args:
            closed: for good; a save that is under way leaves none here either.
        """
        with self._lock:
            old, self._file, self._looked = self._file, None, {}
            self._closed = self._closed or closed
        if old is not None:
            old.release()
