"""What is where in a root, and reading it. Nothing here writes or locks."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_core.errors import (
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    RestoreError,
    UnknownFormat,
)
from ckpt_core.layout import MANIFEST_NAME, RUN_NAME, Manifest, retired_in
from ckpt_core.system.files import advice
from ckpt_core.types import parse_step_dir, step_dir_name
from ckpt_core.units import count_text

INFLIGHT = ".inflight"
SLOTS = ".slots"
CORRUPT = ".corrupt"
PINS = ".pins"
UNPINNED = Path(".levels", "unpinned")
"""Made with the plan of further levels: without any, nobody is to be told."""

_OWN = {INFLIGHT, SLOTS, CORRUPT, PINS, UNPINNED.parts[0]}
"""What a root has beside its steps; whoever opens it empties some of that, and takes none for a root."""

LEVEL_WORD = Path(".levels", RUN_NAME)
"""Which run has a root as a level, where one has, or had."""

LOCK = ".lock"
REPLACED = ".replaced"
RETIRED = ".retired"

_DECIDING_S = 10.0
_MOST_MARK_BYTES = 1 << 16
_LOOK_AGAIN_S = 0.01


def entries(path: Path) -> list[os.DirEntry[str]]:
    """What lies in a directory, sorted by name; nothing where there is no real directory.

    A symbolic link is no directory here: whatever it points at is not ours to list or delete.
    """
    if not is_real_dir(path):
        return []
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def is_real_dir(path: Path) -> bool:
    """Whether `path` is a directory, and not a symbolic link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def step_path(root: Path, step: int) -> Path:
    """Where a step lies once it is committed."""
    return root / step_dir_name(step)


@contextmanager
def listing(path: Path) -> Iterator[None]:
    """Turn an `OSError` of looking at a directory into an error of ours.

    Raises:
        RestoreError: with the `OSError` as its cause.
    """
    try:
        yield
    except OSError as exc:
        text = f"cannot list {path}: {exc.strerror or exc}. Nothing was changed. {advice(exc)}"
        raise RestoreError(text, path=path) from exc


def is_committed(root: Path, step: int) -> bool | None:
    """Whether a step is there; None if a writer that does not go on has it aside (`leaving`, `publish`).

    Waits while a writer has it aside for an instant. Asked after a pin is durable: when it says yes, the step
    stays as long as the pin does; when it says no, nobody brings it back.
    """
    deadline = time.monotonic() + _DECIDING_S
    while not is_real_dir(step_path(root, step)):
        if not _is_aside(root, step):
            return is_real_dir(step_path(root, step))  # it may have come back between the two looks
        if time.monotonic() >= deadline:
            return None
        time.sleep(_LOOK_AGAIN_S)
    return True


def _is_aside(root: Path, step: int) -> bool:
    names = [entry.name for entry in entries(root / INFLIGHT)]
    return any(name.startswith(f"{step:012d}-") and name.endswith(REPLACED) for name in names)


def committed_steps(root: Path) -> tuple[int, ...]:
    """The committed steps of a root, ascending; () when there is no such directory.

    Reads names only, without a lock: it works beside a live writer and on a read-only filesystem. Where a
    root is kept for another node, as in an object store, a step has a name before it is committed, and for a
    while behind that: there its manifest says so.

    Raises:
        RestoreError: the root is there and cannot be listed.
    """
    with listing(root):
        try:
            with os.scandir(root) as found:
                there = list(found)
        except FileNotFoundError:
            return ()
        except NotADirectoryError as exc:
            text = f"{root} is a file: a checkpoint root is a directory"
            raise RestoreError(text, path=root) from exc
        names = [entry.name for entry in there if entry.is_dir(follow_symlinks=False)]
        if any(entry.name == RUN_NAME for entry in there):
            names = [name for name in names if _is_published(root / name)]
    steps = (parse_step_dir(name) for name in names)
    return tuple(sorted(step for step in steps if step is not None))


def check_layout(root: Path) -> None:
    """Be sure that a root has the layout in which steps are saved. Called before anybody saves to it.

    Raises:
        ConfigError: it has that of an object store, in which a peer keeps steps of another node: agents and
            readers there would count a step in the layout of a root, and not find its files. Or it is a step,
            or has the name of one, there or not, or lies within one or within what is a root's own: retention
            or a cleaning up there would take all that is saved here.
    """
    _check_outside(root)
    if _is_word(root / RUN_NAME):
        raise ConfigError(
            f"{root} is kept like an object store ({RUN_NAME} says so), for another node: nothing can be "
            f"saved or taken there beside it. It can be read, pinned and pulled from; save to a root of your "
            f"own. Nothing was changed. If it is a copy that nobody serves, delete {RUN_NAME} there",
            path=root,
        )


def _check_outside(root: Path) -> None:
    if _is_step(root):
        raise ConfigError(
            f"{root} is one step, or a directory of files, and no root: give the root that it lies in, such "
            f"as {root.parent}, or another directory. Nothing was changed",
            path=root,
        )
    real = Path(os.path.realpath(root))
    for place in dict.fromkeys([root, *root.parents, real, *real.parents]):
        in_root = os.path.isfile(place.parent / LOCK)
        is_named = parse_step_dir(place.name) is not None
        # Its own name is looked at below. Of a step that is still to come, whoever has that root would take
        # this directory for it.
        is_lost = place.name in _OWN or (is_named and place not in (root, real))
        if (in_root and is_lost) or ((in_root or is_named) and _is_step(place)):
            raise ConfigError(
                f"{root} lies within {place}, which the root {place.parent} may delete: give that root, or a "
                f"directory outside it. Nothing was changed",
                path=root,
            )
    for place in (root, real):
        # Also where there is no root around it yet: readers take it for a step by its name alone.
        if parse_step_dir(place.name) is not None:
            raise ConfigError(
                f"{place} has the name of a step, which a root may not have: give the root, {place.parent}, "
                f"or a directory of another name. Nothing was changed",
                path=root,
            )


def _is_step(path: Path) -> bool:
    """Whether this is a committed step, or a copy of one: programs may have a file of that name, too."""
    manifest = path / MANIFEST_NAME
    if not os.path.isfile(manifest):
        return False
    if parse_step_dir(path.name) is not None:
        return True
    try:
        Manifest.decode(manifest.read_bytes(), path=manifest)
    except (OSError, CorruptCheckpoint, UnknownFormat):
        return False
    return True


def _is_word(path: Path) -> bool:
    """Whether it says whose steps these are: programs that train may have a file of that name, too."""
    with suppress(OSError, ValueError, RecursionError):
        if os.path.isfile(path) and os.stat(path).st_size <= _MOST_MARK_BYTES:
            word = json.loads(path.read_bytes())
            return isinstance(word, dict) and {"run", "session"} <= word.keys()
    return False


def home_of(folder: Path, manifest: Manifest) -> Path:
    """Where the files of a step, or of a directory of files, lie. Raises OSError.

    Beside the manifest; or in a folder of their attempt, as in an object store and in what a peer keeps. It
    may be a link, which is for the caller to find out.
    """
    own = folder / manifest.attempt.rpartition("-")[2]
    is_beside = os.path.lexists(folder / manifest.ranks[0].file) or not os.path.lexists(own)
    return folder if is_beside else own


def _is_published(place: Path) -> bool:
    """Whether this is a step, in the layout of an object store; what cannot be read is for its readers."""
    path = place / MANIFEST_NAME
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_MARK_BYTES:
            return True
        return not retired_in(path.read_bytes())
    except FileNotFoundError:
        # Its files come first, in a folder; and folders may stay behind when they go.
        return any(not entry.is_dir() for entry in entries(place))
    except (OSError, ValueError, TypeError):
        return True


def resolve(path: Path) -> Path:
    """The step directory that `path` means: itself, or the newest committed step of a root.

    Called by `load`, `verify` and the command line. A directory that holds a manifest counts as a
    step whatever its name (an exported copy), except below `.inflight`.

    Raises:
        NotCommitted: there is no committed step; the text says what was found instead.
        RestoreError: the directory cannot be listed.
    """
    with listing(path):
        return _resolve(path)


def _resolve(path: Path) -> Path:
    step = parse_step_dir(path.name)
    if path.parent.name == INFLIGHT:
        text = f"{path} is a save that was not committed; load one of the steps beside {INFLIGHT}"
        raise NotCommitted(text, path=path)
    if step is not None:
        is_kept = (path.parent / RUN_NAME).exists()
        if is_kept and path.is_dir() and not _is_published(path):
            raise _no_such_step(path, step)
        if path.is_dir() or is_committed(path.parent, step):
            return path
        raise _no_such_step(path, step)
    steps = committed_steps(path)
    if steps:
        return step_path(path, steps[-1])
    if (path / MANIFEST_NAME).is_file():
        return path
    raise NotCommitted(f"{path} holds no committed step: {_found(path)}", path=path)


def _no_such_step(path: Path, step: int) -> NotCommitted:
    steps = committed_steps(path.parent)
    nearest = sorted(sorted(steps, key=lambda other: abs(other - step))[:4])
    known = f"nearest: {', '.join(map(str, nearest))}" if nearest else "there is none at all"
    known = f"{count_text(len(steps), 'committed step')}, {known}"
    text = f"step {step} is not committed in {path.parent}; {known}"
    return NotCommitted(text, step=step, path=path)


def _found(path: Path) -> str:
    if not path.exists():
        return "there is no such directory"
    names = [entry.name for entry in entries(path)]
    if not names:
        return "it is empty"
    attempts = len(entries(path / INFLIGHT))
    started = f"; {count_text(attempts, 'save')} begun and not committed" if attempts else ""
    return f"found {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}{started}"
