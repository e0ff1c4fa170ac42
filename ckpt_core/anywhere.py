"""What is read by its name alone, from a directory or from an object store: the public functions.

A directory goes straight to `ckpt_core.restore` and `ckpt_core.store`; nothing more is imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core import restore, store
from ckpt_core.errors import ConfigError
from ckpt_core.options import Level, check_no_null, scheme_of
from ckpt_core.types import check_step
from ckpt_core.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt_core.levels import Look
    from ckpt_core.system.files import Files

Place = str | os.PathLike[str]
"""A directory; or, as text, "s3://bucket/prefix" or the like."""


def load(
    path: Place,
    *,
    rank: int | None = None,
    trusted: bool = False,
    readers: int = 8,
    progress: bool = True,
    files: Files | None = None,
    only: Iterable[str] | None = None,
) -> Any:
    """The tree that was saved, with fresh CPU tensors; what several ranks stored together is whole again.

    Called by tools and for evaluation; takes no lock and changes nothing on storage. From an object store,
    ranges are read. Its client has threads, which a fork does not copy: a fork of a process that has read
    from one cannot.

    Args:
        path: a step, or a root: then its newest step, and no other if that one is corrupt. A directory, or
            the URL of an object store.
        rank: whose private values to take, where several ranks saved the step; None: those of the first
            rank that is there.
        trusted: allow objects that could run code when they are loaded.
        readers: threads that read, at least 1.
        progress: show on standard error how far it is, once it takes more than a second (`Options.progress`).
        files: how files of a directory are read.
        only: entries that are wanted, with all that is in them, such as "model" or "model.encoder"; nothing
            else is read, and the tree has nothing else. None: all.

    Raises:
        ConfigError: `readers` is wrong; a URL with an unknown scheme, or without the extra that it needs;
            `only` names what is not there.
        NotCommitted: there is no step, or it was retired by its writer while it was read.
        CorruptCheckpoint: bytes differ from what was saved.
        UntrustedData: it holds objects that need `trusted=True`.
        UnknownFormat: written by a newer format.
        RestoreError: the system refused a read, a read hangs, the store cannot be reached, `rank` is not
            there, or the root is that of one node and the rest of a leaf is in another one.
    """
    readers = parse_count(readers, field="readers")
    url = url_of(path)
    how: Any = {"rank": rank, "trusted": trusted, "readers": readers, "progress": progress}
    # Used at each try.
    how["only"] = list(only) if isinstance(only, Iterator) else only
    if url is None:
        return restore.load(local(path), files=files, **how)
    return _load_far(url, **how)


def _load_far(url: str, **how: Any) -> Any:
    from ckpt_core.levels import look_at

    for _ in range(restore.MOST_TRIES):
        is_root = False
        try:
            with look_at(url) as look:
                step = store.resolve(look.path)
                is_root = step != look.path
                return restore.load(look.ready(step), files=look.files, **how)
        except restore.Retired:
            if not is_root:
                raise
    raise restore.retired_too_fast(url)


def verify(
    path: Place,
    *,
    readers: int = 8,
    share: tuple[int, int] = (0, 1),
    keep_cached: bool = False,
    progress: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> restore.Report:
    """Compare every byte of a step, or of every step of a root, with its manifests.

    Also of a directory of files (`begin_files`), when `path` is one.

    Called by tools and by users; takes no lock, changes nothing, needs no state. Also checks that the
    header of each shard file tells other safetensors readers what the manifest tells us. A step that a
    writer retires meanwhile is left out of the report of a root.

    Args:
        path: a directory, or the URL of an object store.
        readers: threads that read, at least 1.
        share: (number, count): read one of `count` parts of the bytes alone, equal but for a chunk of each
            step, so that processes can share the work; names and sizes are those of all files nevertheless.
        keep_cached: leave what is read in the page cache, for who reads the files next; by itself, what is
            not there is read past it, which is faster.
        progress: called now and then with bytes done and bytes in all of the step that is being read.
        files: how files of a directory are read.

    Raises:
        ConfigError: `readers` or `share` is wrong, or a URL has an unknown scheme or lacks the extra that it
            needs.
        NotCommitted: there is no step at `path`, or it was retired while it was read.
        RestoreError: the root cannot be listed, the store cannot be reached, or there is no memory or thread
            to read with. Nothing that is wrong inside a step raises.
    """
    readers = parse_count(readers, field="readers")
    url = url_of(path)
    how: Any = {"readers": readers, "share": share, "progress": progress}
    if url is None:
        return restore.verify(local(path), keep_cached=keep_cached, files=files, **how)
    from ckpt_core.levels import look_at

    with look_at(url) as look:
        path = store.resolve(look.path)
        if path == look.path:
            return _verify_far(look, path, **how)
        look.outline()
        found: list[restore.StepReport] = []
        for step in store.committed_steps(look.path):
            with suppress(restore.Retired):
                found += _verify_far(look, store.step_path(look.path, step), **how).steps
    return restore.Report(look.path, tuple(found))


def _verify_far(look: Look, path: Path, **how: Any) -> restore.Report:
    report = restore.verify(look.ready(path), files=look.files, **how)
    look.check(None if report.ok else path)
    return report


def committed_steps(root: Place) -> tuple[int, ...]:
    """The committed steps of a root, ascending; () when there is no such directory.

    Reads names only, without a lock: it works beside a live writer and on a read-only filesystem.

    Args:
        root: a directory, or the URL of an object store.

    Raises:
        ConfigError: a URL with an unknown scheme, or without the extra that it needs; or no path.
        RestoreError: the root is there and cannot be listed, or the store cannot be reached.
    """
    url = url_of(root)
    if url is None:
        return store.committed_steps(local(root))
    from ckpt_core.levels import look_at

    with look_at(url) as look:
        return store.committed_steps(look.path)


def committed_directories(root: Place, *, pointer: str | None = None) -> tuple[str, ...]:
    """Names of the directories that `begin_files` committed in `root`, newest first; () without any.

    Reads their manifests and the sizes of their files; one that lacks a file, or has one of another size,
    is left out. Takes no lock.

    Args:
        root: a directory, or the URL of an object store.
        pointer: only those that were committed with this one, such as "latest".

    Raises:
        ConfigError: a URL with an unknown scheme, or without the extra that it needs; or no path.
        RestoreError: the root cannot be listed, the store cannot be reached or hangs, or there is no memory
            or thread to read with.
    """
    url = url_of(root)
    if url is None:
        return restore.committed_directories(local(root), pointer=pointer)
    from ckpt_core.levels import look_at

    with look_at(url) as look:
        look.directories()
        return restore.committed_directories(look.path, pointer=pointer)


def step_path(root: Place, step: int) -> Path:
    """Where a step of a root lies once it is committed. Looks at no storage: it need not be there.

    Args:
        root: a directory.
        step: its number.

    Raises:
        ConfigError: `root` is a URL, or `step` is no int in 0 .. 10**18-1.
    """
    if url_of(root) is not None:
        raise ConfigError(f"root={root!r} is a URL, where no step has a path: name a directory")
    return store.step_path(local(root), check_step(step))


def url_of(place: Place) -> str | None:
    """The URL of a place in an object store, as `Level` has it; None for a directory.

    Raises:
        ConfigError: it has an unknown scheme, or names no bucket.
    """
    if not isinstance(place, str) or scheme_of(place) is None:
        return None
    url = Level(place).url
    return None if scheme_of(url) is None else url


def local(place: Place) -> Path:
    """A place that `url_of` says is a directory.

    Raises:
        ConfigError: it is empty, has a null character, or begins with "~" where no home is known.
    """
    check_no_null(place)
    if not os.fspath(place):
        raise ConfigError(
            "'' names no place: give a directory, as '.' where the present one is meant"
        )
    if scheme_of(place) is not None:
        return Path(Level(os.fspath(place)).url)
    try:
        return Path(place).expanduser()
    except RuntimeError as exc:  # no such user, or none that the system knows
        raise ConfigError(
            f"{os.fspath(place)!r}: the home that ~ stands for is not known: give the whole path"
        ) from exc
