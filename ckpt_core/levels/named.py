"""Directories of files at levels: which are sent, and where pointers stand there.

    here = NamedFiles(root, files=files).look()              those of the root, with what names them
    wanted_directories(here, level, there=far.directories())  those to send, in this order
    due_pointers(here, there=..., pointed=far.pointers())     then: which pointers move, and to what

Idea: a directory of files goes to a level as a step does, by its number. A pointer there names the newest one
that is whole there, of those that it has named in the root: so it may lag behind the root's, and never names
what is not there. Retention leaves them alone, there as here.

Called by the agent. Pure but for `NamedFiles`, which only reads.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, is_directory_name
from ckpt_core.levels.far import Copy
from ckpt_core.levels.wants import meets
from ckpt_core.options import Level
from ckpt_core.system.files import Files

_MOST_POINTER_BYTES = 200


@dataclass(frozen=True, slots=True)
class Named:
    """A directory of files in a root.

    Attributes:
        copy: which save it is.
        pointers: files in the root that were to name it.
        current: of these, those that name it now.
        here: its manifest names the files of all ranks; else other nodes have the rest.
    """

    copy: Copy
    pointers: frozenset[str]
    current: frozenset[str]
    here: bool = True

    @property
    def name(self) -> str:
        """In the root, and at every level."""
        return self.copy.target


class NamedFiles:
    """The committed directories of files of a root, looked at again and again."""

    def __init__(self, root: Path, *, files: Files) -> None:
        self._root = root
        self._files = files
        self._known: dict[str, tuple[object, Manifest | None]] = {}

    def look(self) -> tuple[Named, ...]:
        """Those that have a manifest that can be understood; reads only manifests that it has not seen yet.

        Raises:
            OSError: the root cannot be listed.
        """
        with os.scandir(self._root) as found:
            entries = [entry for entry in found if is_directory_name(entry.name)]
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        self._known = {name: self._manifest(name) for name in folders}
        named = _pointers(entries, folders)
        return tuple(
            _named(name, manifest, named)
            for name, (_, manifest) in sorted(self._known.items())
            if manifest is not None
        )

    def _manifest(self, name: str) -> tuple[object, Manifest | None]:
        path = self._root / name / MANIFEST_NAME
        with contextlib.suppress(OSError, CkptError):
            found = os.lstat(path)
            mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if name in self._known and self._known[name][0] == mark:
                return self._known[name]
            if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_MANIFEST_BYTES:
                manifest = Manifest.decode(path.read_bytes(), path=path)
                # One that was copied to another name is a user's own copy.
                return mark, manifest if manifest.directory == name else None
        return None, None


def wanted_directories(
    here: Iterable[Named], level: Level, *, there: Mapping[str, Copy], last: bool = False
) -> tuple[Named, ...]:
    """Directories that a level wants and does not have, in the order in which they are to be sent.

    As for steps (`wanted`), by the number of the save; but several directories may have the same number.

    Args:
        here: those of the root. One of which other nodes have a part is never wanted.
        there: what is whole at the level.
        last: nobody saves any more, so that the newest goes there whatever `every` says.
    """
    known = [one for one in here if one.here]
    newest = max((copy.step for copy in there.values()), default=-1)
    end = max((one.copy.step for one in known), default=-1)
    open_ones = [
        one
        for one in known
        if (meets(one.copy.step, level) or (last and one.copy.step == end))
        and there.get(one.name) != one.copy
        and (one.copy.step >= newest or one.name in there)
    ]
    steps = sorted({one.copy.step for one in open_ones})[-level.backlog :]
    fitting = [one for one in open_ones if one.copy.step in steps]
    return tuple(sorted(fitting, key=lambda one: (one.copy.step, bool(one.current), one.name)))


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


def _named(name: str, manifest: Manifest, named: Mapping[str, set[str]]) -> Named:
    current = frozenset(named.get(name, ()))
    noted = {manifest.pointer} - {None}
    return Named(
        Copy(manifest.step, manifest.attempt, name),
        pointers=frozenset(one for one in noted if one is not None) | current,
        current=current,
        here=len(manifest.ranks) == manifest.world_size,
    )


def _pointers(entries: Iterable[os.DirEntry[str]], folders: Iterable[str]) -> dict[str, set[str]]:
    """Directory -> small regular files whose whole content is its name."""
    known = set(folders)
    found: dict[str, set[str]] = {}
    for entry in entries:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if not entry.is_file(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_size <= _MOST_POINTER_BYTES:
                text = Path(entry.path).read_bytes().decode()
                if text in known:
                    found.setdefault(text, set()).add(entry.name)
    return found
