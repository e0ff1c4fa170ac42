"""Named files that stay the same: which of them may be links to that file in an earlier directory.

A named file is one piece of `torch.save`, so it is shared whole or not at all. Whether it is likely to be
the same is a guess of two looks: at all that is not tensor data, when it is added, and at some cache lines of
each piece, by the writers. What counts is the bytes, as for still files; but these are copied first, behind
the same barrier, and compared by the writers: what comes of a device is looked at as well as what is here.

    first save: looked at -> second, alike: hashed while it is written, held open -> third: compared, linked
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import xxhash

from ckpt_core.options import Options
from ckpt_core.persist import ShardFile
from ckpt_core.save.still_group import Rebase, StillGroup
from ckpt_core.system.threads import own_lock
from ckpt_core.torch_zip import ZipLayout

_MOST_FILES = 128
"""So many may be held open by a process; others are written each time."""

_FIRST_WAIT = 4
"""Saves for which a file that has changed after all is not looked at; twice as many each time."""


class NamedStill(StillGroup):
    """A named file, and the last one of that name in a committed directory. Thread-safe."""

    def __init__(self, name: str, *, rebase: Rebase) -> None:
        super().__init__((name,), declared=False, rebase=rebase)
        self._looking = own_lock()
        self._frames = b""
        self._looks: tuple[bytes, ...] = ()
        self._wait, self._next_wait = 0, _FIRST_WAIT

    def added(self, layout: ZipLayout) -> None:
        """It is to be saved with this layout. Called on the training thread."""
        frames = _digest(layout)
        with self._looking:
            changed, self._frames = frames != self._frames, frames
            if changed:
                self._looks = ()
        if changed:
            self.forget()

    @property
    def looks(self) -> tuple[bytes, ...] | None:
        """How its pieces looked; None while nobody looks."""
        with self._looking:
            return None if self._wait else self._looks

    def compare(self, shard: ShardFile) -> None:
        """Have the writers compare the file of a save with the last one, where there is one."""
        if shard.request.like is not None and self.lend(shard) is not None:
            shard.compare()

    def committed(self, shard: ShardFile, step: Path, look: Mapping[str, bytes]) -> None:
        """See `StillGroup.committed`."""
        super().committed(shard, step, look)
        with self._looking:
            if shard.request.like is None:
                self._wait = max(self._wait - 1, 0)
                return
            if not shard.is_shared:
                self._looks = shard.looks
            has_changed = shard.earlier is not None and not shard.is_shared
            if has_changed:
                self._looks = ()
            if has_changed and not self._wait:
                # Saves that were in flight meanwhile have seen the same change: it counts once.
                self._wait = self._next_wait
                self._next_wait *= 2
        if has_changed:
            self.forget()


class NoNamedSharing:
    """Every save writes all."""

    def of(self, name: str, layout: ZipLayout) -> NamedStill | None:
        """What is known of a file that is added; None: it is written."""
        return None

    def ended(self, names: Collection[str]) -> None:
        """These are all files of a save: nothing is kept of others."""

    def forget(self) -> None:
        """Share no file that is there now."""

    def close(self) -> None:
        """Share no more."""


class UnchangedNamed(NoNamedSharing):
    """Remembers the files of the last directory. Used on the training thread."""

    def __init__(self, options: Options) -> None:
        self._rebase = Rebase.of(options)
        self._known: dict[str, NamedStill] = {}

    def of(self, name: str, layout: ZipLayout) -> NamedStill | None:
        """See `NoNamedSharing.of`."""
        if name not in self._known:
            if len(self._known) >= _MOST_FILES:
                return None
            self._known[name] = NamedStill(name, rebase=self._rebase)
        self._known[name].added(layout)
        return self._known[name]

    def ended(self, names: Collection[str]) -> None:
        """See `NoNamedSharing.ended`."""
        for name in self._known.keys() - names:
            self._known.pop(name).forget(closed=True)

    def forget(self) -> None:
        """See `NoNamedSharing.forget`."""
        for still in self._known.values():
            still.forget()

    def close(self) -> None:
        """See `NoNamedSharing.close`."""
        for still in self._known.values():
            still.forget(closed=True)


def named_sharing_for(options: Options) -> NoNamedSharing:
    """What the options ask for."""
    return UnchangedNamed(options) if options.share_unchanged else NoNamedSharing()


def _digest(layout: ZipLayout) -> bytes:
    """Of all that is not tensor data, and of where it lies."""
    found = xxhash.xxh3_128()
    for offset, data in layout.frames:
        found.update(offset.to_bytes(8, "little"))
        found.update(data)
    return found.digest()
