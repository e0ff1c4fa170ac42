"""Steps that retention never takes: one empty file each in `.pins`, which any process may set."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt_core.store.names import PINS, entries
from ckpt_core.store.trees import ensure_dir
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir


def pinned_steps(root: Path) -> frozenset[int]:
    """The pinned steps of a root, committed or not. Read only, no lock."""
    steps = (parse_step_dir(f"step-{entry.name}") for entry in entries(root / PINS))
    return frozenset(step for step in steps if step is not None)


def add_pin(root: Path, step: int, *, files: Files) -> None:
    """Pin a step durably; a no-op when it is pinned."""
    ensure_dir(files, root / PINS)
    files.sync_dir(root)
    with contextlib.suppress(FileExistsError):
        files.write_new(_pin_path(root, step), b"")
    files.sync_dir(root / PINS)


def remove_pin(root: Path, step: int, *, files: Files) -> None:
    """Unpin a step durably; a no-op when it is not pinned."""
    if step not in pinned_steps(root):
        return
    with contextlib.suppress(FileNotFoundError):
        files.unlink(_pin_path(root, step))
    files.sync_dir(root / PINS)


def _pin_path(root: Path, step: int) -> Path:
    return root / PINS / f"{step:012d}"
