"""Steps of a root that parity rests on: one empty file each in `.levels/holds`, set by the agent.

As with pins (`ckpt_core.store.leaving`): a hold is durable before anybody looks whether the step is there,
and retention reads them once more when the name of a step is gone. So one of both always sees the other. The
retention of a job whose levels are others does not ask.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ckpt_core.levels.mailbox import LEVELS
from ckpt_core.store import ensure_dir, entries, is_committed
from ckpt_core.system.files import Files

_HOLDS = "holds"


def held_steps(root: Path) -> frozenset[int]:
    """Steps that are held, there or not. Lets `OSError` through."""
    names = [entry.name for entry in entries(root / LEVELS / _HOLDS)]
    return frozenset(int(name) for name in names if name.isascii() and name.isdecimal())


def hold(root: Path, step: int, *, files: Files) -> bool:
    """Keep a step in its root until it is let go; False: it is not there, and not held.

    Lets `OSError` through.
    """
    folder = root / LEVELS / _HOLDS
    ensure_dir(files, folder)
    files.sync_dir(folder.parent)
    if step not in held_steps(root):
        with suppress(FileExistsError):
            files.write_new(folder / f"{step:012d}", b"")
        files.sync_dir(folder)
    # Order matters: looked at once the hold is durable.
    if is_committed(root, step):
        return True
    let_go(root, [step], files=files)
    return False


def let_go(root: Path, steps: Collection[int], *, files: Files) -> None:
    """Let retention decide again. Lets `OSError` through."""
    for step in held_steps(root).intersection(steps):
        with suppress(FileNotFoundError):
            files.unlink(root / LEVELS / _HOLDS / f"{step:012d}")
