"""Directories of files at levels: which are sent, and where pointers stand there.

    here = NamedFiles(far_of_the_root).look()                 those of the root, with what names them
    wanted_directories(here, level, there=far.directories())  those to send, in this order
    due_pointers(here, there=..., pointed=far.pointers())     then: which pointers move, and to what

Idea: a directory of files goes to a level as a step does, by its number. A pointer there names the newest one
that is whole there, of those that it has named in the root: so it may lag behind the root's, and never names
what is not there. Retention leaves them alone, there as here.

Called by the agent, and by whatever brings one back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.levels.far.door import Copy, Far
from ckpt_core.levels.wants import meets
from ckpt_core.options import Level


@dataclass(frozen=True, slots=True)
class Named:
    """A directory of files in a root, or at a level.

    Attributes:
        copy: which save it is.
        pointers: files beside it that name it, or were to name it.
        current: of these, those that name it now.
        here: its manifest names the files of all ranks; else other nodes have the rest.
        made_unix_s: when it was saved.
    """

    copy: Copy
    pointers: frozenset[str]
    current: frozenset[str]
    here: bool = True
    made_unix_s: float = 0.0

    @property
    def name(self) -> str:
        """In the root, and at every level."""
        return self.copy.target


class NamedFiles:
    """The directories of files of a root or a level, looked at again and again."""

    def __init__(self, far: Far) -> None:
        self.far = far
        self._known: dict[Copy, Manifest | None] = {}

    def look(self) -> tuple[Named, ...]:
        """Those that are whole; reads only manifests that it has not seen yet.

        Raises:
            Away: they cannot be listed.
        """
        there = self.far.directories()
        self._known = {copy: self._manifest(copy) for copy in there.values()}
        current: dict[str, set[str]] = {}
        for pointer, name in (self.far.pointers() if there else {}).items():
            current.setdefault(name, set()).add(pointer)
        return tuple(
            _named(copy, manifest, frozenset(current.get(copy.target, ())))
            for copy, manifest in self._known.items()
            if manifest is not None
        )

    def _manifest(self, copy: Copy) -> Manifest | None:
        if copy in self._known:
            return self._known[copy]
        data = self.far.manifest(copy.target)
        with contextlib.suppress(CkptError):
            manifest = Manifest.decode(data or b"", path=Path(copy.target, MANIFEST_NAME))
            # What somebody has copied to another name is their own.
            if (manifest.directory, manifest.attempt) == (copy.directory, copy.attempt):
                return manifest
        return None


def newest_directories(here: Iterable[Named]) -> tuple[Named, ...]:
    """Those of the highest number, of all that may go to a level."""
    known = [one for one in here if one.here]
    end = max((one.copy.step for one in known), default=-1)
    return tuple([one for one in known if one.copy.step == end])


def wanted_directories(
    here: Iterable[Named], level: Level, *, there: Mapping[str, Copy], last: bool = False
) -> tuple[Named, ...]:
    """Directories that a level wants and does not have, in the order in which they are to be sent.

    As for steps (`wanted`), by the number of the save; but several directories may have the same number.

    Args:
        here: those of the root. One of which other nodes have a part is never wanted.
        there: what is whole at the level.
        last: nothing comes after the newest, so that it goes there whatever `every` says.
    """
    known = [one for one in here if one.here]
    newest = max((copy.step for copy in there.values()), default=-1)
    ends = newest_directories(known)
    open_ones = [
        one
        for one in known
        if (meets(one.copy.step, level) or (last and one in ends))
        and there.get(one.name) != one.copy
        and (one.copy.step >= newest or one.name in there)
    ]
    steps = sorted({one.copy.step for one in open_ones})[-level.backlog :]
    fitting = [one for one in open_ones if one.copy.step in steps]
    return tuple(sorted(fitting, key=lambda one: (one.copy.step, bool(one.current), one.name)))


def overtaken(here: Iterable[Named], level: Level, *, there: Mapping[str, Copy]) -> dict[str, str]:
    """Directories that a level never gets, since newer ones are there: name -> attempt."""
    newest = max((copy.step for copy in there.values()), default=-1)
    return {
        one.name: one.copy.attempt
        for one in here
        if meets(one.copy.step, level) and one.copy.step < newest and one.name not in there
    }


def due_pointers(
    here: Iterable[Named], *, there: Mapping[str, Copy], pointed: Mapping[str, str]
) -> dict[str, str]:
    """The pointers of a level that are to move, and what each is to name: the newest that it may.

    Never back to a directory of a lower number than the one that it names, and never to one that is not
    whole there. Of several with the same number: the one that the root's pointer names.
    """
    at_level = [one for one in here if there.get(one.name) == one.copy]
    due = {}
    for pointer in sorted({pointer for one in at_level for pointer in one.pointers}):
        candidates = [one for one in at_level if pointer in one.pointers]
        best = max(candidates, key=lambda one: (one.copy.step, pointer in one.current))
        now = there.get(pointed.get(pointer, ""))
        if now is not None:
            behind = now.step < best.copy.step
            instead = now.step == best.copy.step and pointer in best.current
            if now == best.copy or not (behind or instead):
                continue
        due[pointer] = best.name
    return due


def _named(copy: Copy, manifest: Manifest, current: frozenset[str]) -> Named:
    noted = frozenset(() if manifest.pointer is None else (manifest.pointer,))
    whole = len(manifest.ranks) == manifest.world_size
    return Named(copy, noted | current, current, whole, manifest.created_unix_s)
