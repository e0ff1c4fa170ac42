"""A root: can it be written, on what filesystem is it, and what does it hold."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ckpt_core.cli.doctor.contents import Contents, check_contents, contents_of
from ckpt_core.cli.doctor.finding import Finding, note, ok, problem, warning
from ckpt_core.cli.doctor.mounts import judge_mount, mount_of
from ckpt_core.cli.doctor.storage import try_storage
from ckpt_core.errors import CkptError
from ckpt_core.system.files import Files
from ckpt_core.units import size_text

_FEW_INODES = 1000


def check_root(root: Path) -> list[Finding]:
    """All about a root. One that does not exist is not made: its nearest directory is tried instead."""
    # Of an absolute path: the parents of `ckpts` and `../ckpts` are wanted.
    nearest = _nearest(Path(os.path.abspath(root)))
    exists = os.path.lexists(root)
    there = root if exists else nearest
    if not there.is_dir():
        return [problem("root", f"{there} is no directory", "name another")]
    held, contents = _held(root) if exists else ([], None)
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"{there} cannot be written{'' if exists else f', so {root} cannot be made'}"
        found = problem("root", text, "check its owner, its permissions and its mount options")
        return [found, *judge_mount(mount_of(there)), *held]
    return [
        ok("root", f"{root} can be {'written' if exists else 'made'}"),
        *judge_mount(mount_of(there)),
        _space(there, contents),
        *_tried(there),
        *held,
    ]


def _nearest(path: Path) -> Path:
    """The path, or the directory in which the first missing one would be made."""
    return next(
        itertools.dropwhile(lambda place: not os.path.lexists(place), (path, *path.parents))
    )


def _held(root: Path) -> tuple[list[Finding], Contents | None]:
    try:
        contents = contents_of(root)
    except (CkptError, OSError) as exc:
        return [problem("root", str(exc), "name the directory that holds the steps")], None
    return check_contents(contents), contents


def _tried(directory: Path) -> list[Finding]:
    try:
        return try_storage(directory)
    except OSError as exc:
        text = f"a trial in {directory} failed: {exc.strerror or exc}"
        return [problem("commit", text, "free space, or check the directory")]


def _space(directory: Path, contents: Contents | None) -> Finding:
    stats = os.statvfs(directory)
    free = Files().free_bytes(directory)
    text = f"{size_text(free)} free" if stats.f_blocks else "the filesystem tells no size"
    if stats.f_files and stats.f_favail < _FEW_INODES:
        found = f"{text}, but names for {stats.f_favail} files only"
        return warning("free space", found, "remove files that nobody needs")
    if contents is not None and contents.newest_bytes is None and contents.listing.steps:
        text = f"{text}; what the newest checkpoint takes is not known"
        return note("free space", text, "run this as the owner of the steps")
    if contents is None or contents.newest_bytes is None:
        return ok("free space", text)
    size, room = contents.newest_bytes, free + contents.recycled_bytes
    text = f"{text}; the newest checkpoint takes {size_text(size)}"
    if room < size:
        advice = "the next save is refused: free space, or keep fewer steps"
        return problem("free space", text, advice)
    if room < 2 * size:
        advice = "one save fits, two in flight do not: free space, or keep fewer steps"
        return warning("free space", text, advice)
    return ok("free space", text)
