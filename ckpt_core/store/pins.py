"""Steps that retention never takes: one empty file each in `.pins`, which any process may set.

A root may be lost with its pins, and further levels keep theirs then. So they are told that somebody has
unpinned a step, and take nothing for that but a mark in `.levels/unpinned`, which stays until all of them
have done so. A pin outweighs the marks of its step.

A pin is named as its step is, `.pins/000000000100`; in an object store, and so in what a peer keeps for
another node, `.pins/100`. Both are read everywhere; written is what the owner of the place asks for.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.layout import RUN_NAME
from ckpt_core.store.names import PINS, UNPINNED, entries, is_real_dir
from ckpt_core.store.trees import ensure_dir
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir, step_dir_name


def pinned_steps(root: Path) -> frozenset[int]:
    """The pinned steps of a root, committed or not. Read only, no lock."""
    steps = (_pinned(entry.name) for entry in entries(root / PINS))
    return frozenset(step for step in steps if step is not None)


def pins_told(root: Path) -> frozenset[int] | None:
    """The same, for who only tells of them; None: not known, since this user may not read them."""
    try:
        return pinned_steps(root)
    except PermissionError:
        return None


def check_pins(root: Path) -> None:
    """Called before anything is done that pins decide on.

    Raises:
        ConfigError: this user may not read them.
    """
    if pins_told(root) is None:
        raise ConfigError(
            f"{root / PINS}: this user may not read which steps are pinned. Nothing was changed. "
            "Run it as the owner of that directory, or let this user read it"
        )


def add_pin(root: Path, step: int, *, files: Files) -> None:
    """Pin a step durably; a no-op when it is pinned."""
    ensure_dir(files, root / PINS)
    files.sync_dir(root)
    # What tells the layout of an object store, to those who list steps as well.
    name = str(step) if (root / RUN_NAME).exists() else _padded(step)
    with contextlib.suppress(FileExistsError):
        files.write_new(root / PINS / name, b"")
    files.sync_dir(root / PINS)


def remove_pin(root: Path, step: int, *, files: Files) -> None:
    """Unpin a step durably; a no-op when it is not pinned."""
    if step not in pinned_steps(root):
        return
    for name in (_padded(step), str(step)):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(root / PINS / name)
    files.sync_dir(root / PINS)


def unpinned_marks(root: Path) -> dict[str, int]:
    """What further levels are to be told: names of marks, none of which comes twice, and their steps."""
    found = {}
    for entry in entries(root / UNPINNED):
        step = parse_step_dir(f"step-{entry.name.partition('-')[0]}")
        if step is not None:
            found[entry.name] = step
    return found


def mark_unpinned(root: Path, step: int, *, files: Files) -> None:
    """Note durably that somebody unpins a step, where there are further levels; called before it is unpinned.

    Also of one that is not pinned: this root may have been made anew since it was.
    """
    folder = root / UNPINNED
    if not is_real_dir(folder):
        return
    if step not in pinned_steps(root) and step in unpinned_marks(root).values():
        return
    files.write_new(folder / f"{step:012d}-{secrets.token_hex(4)}", b"")
    files.sync_dir(folder)


def forget_marks(root: Path, names: Iterable[str], *, files: Files) -> None:
    """Take marks away: all levels have been told, or the step is pinned again."""
    for name in (names := list(names)):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(root / UNPINNED / name)
    if names:
        files.sync_dir(root / UNPINNED)


def _pinned(name: str) -> int | None:
    """The step that a file in `.pins` pins, by either name."""
    if name.isascii() and name.isdecimal() and not name.startswith("0"):
        return parse_step_dir(f"step-{name.zfill(len(_padded(0)))}")
    return 0 if name == "0" else parse_step_dir(f"step-{name}")


def _padded(step: int) -> str:
    return step_dir_name(step).removeprefix("step-")
