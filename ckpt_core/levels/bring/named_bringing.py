"""A directory of files is brought back from the nearest level that has it whole, with its pointer.

    bring_directory(root, levels, pointer="latest")     by a process of its own: for whoever trains
    bring_named(fars, wish, files=files)                 the same here: for the command line

The newest one first; of several levels that have it, the nearest; the next one where it is damaged. It is
published like a save: one rename, then the pointer. Whatever the root had of that name goes as a whole.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.errors import (
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    RestoreError,
    UnknownFormat,
)
from ckpt_core.levels.bring.fetching import Wanted, fetch
from ckpt_core.levels.errands import Progress, run_errand
from ckpt_core.levels.far.door import Away, Far
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.helping import run_here
from ckpt_core.levels.named import Named, NamedFiles
from ckpt_core.options import Level, checked_root, parse_levels
from ckpt_core.store import check_layout, opened_by_hand
from ckpt_core.system.files import Files
from ckpt_core.types import Destination

_SILENT_S = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """Which directory, and where to.

    Attributes:
        root: made if it is missing.
        directory: its name; None: the newest of those that `pointer` may name.
        pointer: the file in the root that names it then; None: none does.
        above: only one of a higher number.
    """

    root: Path
    directory: str | None = None
    pointer: str | None = None
    above: int = -1


@dataclass(frozen=True, slots=True)
class Brought:
    """What came of it.

    Attributes:
        directory: its name; None: no level has one.
        url: where it came from.
        problems: why levels could not be asked, or had it damaged.
    """

    directory: str | None = None
    url: str = ""
    problems: tuple[str, ...] = ()


def bring_directory(
    root: str | os.PathLike[str],
    levels: Sequence[Level | Mapping[str, Any] | str],
    *,
    directory: str | None = None,
    pointer: str | None = None,
    newer_than: str | None = None,
    beat: Callable[[], None] | None = None,
) -> str | None:
    """Make a directory of files that a level holds one of `root`, every byte verified; its name.

    Called before the root is opened for writing, by one process for each root. Done by a process of its own,
    that imports no torch; what is wrong on the way, and passed over, is a warning.

    Args:
        directory: which; None: the newest of those that `pointer` names, or was to name.
        pointer: the file in the root that names it then, such as "latest"; never moved back.
        newer_than: a directory of the root that will do, unless a level has one of a higher number.
        beat: called by the calling thread every 20 s while it goes on, for whoever has others wait for it.

    Returns:
        None when no level has such a one. The root is as it was then.

    Raises:
        ConfigError: an argument is wrong, a client is missing, or the root is kept for another node.
        RootBusy: somebody writes to the root.
        PersistError, CommitError: it cannot be written there.
        CorruptCheckpoint: levels have it, and none of them whole.
        RestoreError: a level could not be asked, and no other has it.
    """
    request = {
        "root": str(checked_root(root)),
        "levels": [level.url for level in parse_levels(levels)],
        "directory": directory,
        "pointer": pointer,
        "newer_than": newer_than,
    }
    if beat is None:
        answer = run_errand("directory", request, timeout_s=_SILENT_S)
    else:
        answer = _with_beats(request, beat)
    for problem in answer["problems"]:
        warnings.warn(f"bringing back a directory of files: {problem}", stacklevel=2)
    name: str | None = answer["directory"]
    return name


def _with_beats(request: dict[str, Any], beat: Callable[[], None]) -> Any:
    def ask(tell: Progress) -> Any:
        return run_errand("directory", request, timeout_s=_SILENT_S, progress=tell)

    # It is the errand that must not be silent, and it says so itself.
    return run_here(ask, timeout_s=2 * _SILENT_S, beat=beat)


def serve(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The errand."""
    files, root = Files(), Path(request["root"])
    with ExitStack() as opened:
        fars = [opened.enter_context(open_far(url, files=files)) for url in request["levels"]]
        above = _number(root, request["newer_than"], files=files)
        wish = Wish(root, request["directory"], request["pointer"], above)
        found = bring_named(fars, wish, files=files, progress=progress)
    return {"directory": found.directory, "url": found.url, "problems": list(found.problems)}


def bring_named(
    fars: Sequence[Far], wish: Wish, *, files: Files, progress: Progress | None = None
) -> Brought:
    """The same, in this process.

    Args:
        fars: the nearest first.
        progress: told the bytes done and in all.

    Raises:
        As `bring_directory`.
    """
    if wish.directory is None and wish.pointer is None:
        raise ConfigError("name a directory or a pointer: nothing says which one is meant")
    check_layout(wish.root)
    problems: list[Exception] = []
    for one, far in _candidates(fars, wish, problems):
        try:
            _bring(one, far, wish, files=files, progress=progress or _untold)
        except (Away, CorruptCheckpoint, NotCommitted, UnknownFormat) as exc:
            problems.append(exc)
            continue
        return Brought(one.name, far.url, tuple(map(str, problems)))
    if not problems:
        return Brought()
    text = "; ".join(map(str, problems))
    what = wish.directory or f"what {wish.pointer} names"
    text = f"{what} could not be brought back to {wish.root}: {text}. Nothing was changed there"
    if all(isinstance(problem, CorruptCheckpoint) for problem in problems):
        raise CorruptCheckpoint(text, path=wish.root)
    raise RestoreError(text, path=wish.root)


def _candidates(
    fars: Sequence[Far], wish: Wish, problems: list[Exception]
) -> Iterator[tuple[Named, Far]]:
    """What levels have of it, the best first."""
    found = []
    for number, far in enumerate(fars):
        try:
            looked = NamedFiles(far).look()
        except Away as exc:
            problems.append(exc)
            continue
        for one in looked:
            fits = (
                wish.pointer in one.pointers
                if wish.directory is None
                else one.name == wish.directory
            )
            if fits and one.here and one.copy.step > wish.above:
                # Order matters: the nearest level may have been left out for a while, and hold what is old.
                age = (-one.copy.step, wish.pointer not in one.current, -one.made_unix_s)
                key = (*age, number, one.name)
                found.append((key, one, far))
    for _, one, far in sorted(found, key=lambda row: row[0]):
        yield one, far


def _bring(one: Named, far: Far, wish: Wish, *, files: Files, progress: Progress) -> None:
    with opened_by_hand(wish.root, files=files) as store:
        to = Destination(one.name, _moving(one, wish, files=files))
        attempt = store.begin(one.copy.step, one.copy.attempt, to)
        try:
            fetch(far, Wanted(one.copy, attempt.path, (), 0), progress, files=files)
            store.publish(attempt)
        except BaseException:
            store.abandon(attempt)
            raise


def _moving(one: Named, wish: Wish, *, files: Files) -> str | None:
    """The pointer that is to move: none that names a newer directory of the root."""
    if wish.pointer is None:
        return None
    here = NamedFiles(open_far(str(wish.root), files=files)).look()
    newest = max((other.copy.step for other in here if wish.pointer in other.current), default=-1)
    return wish.pointer if one.copy.step >= newest else None


def _number(root: Path, name: str | None, *, files: Files) -> int:
    """That of a directory of the root; -1 when it is not there."""
    if name is None:
        return -1
    there = open_far(str(root), files=files).directories()
    return there[name].step if name in there else -1


def _untold(done: int, total: int) -> None:
    return
