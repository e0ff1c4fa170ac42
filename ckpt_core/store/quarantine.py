"""Where steps go that were found corrupt: nothing is deleted, and they no longer stand as the newest."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.store.names import CORRUPT, step_path
from ckpt_core.store.trees import ensure_dir
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name

logger = logging.getLogger(__name__)


@contextmanager
def moving(root: Path, *, files: Files) -> Iterator[None]:
    """Make `.corrupt` before, and the moves durable after; lets `OSError` through."""
    # Order matters: the new directory has a name before a step goes there.
    ensure_dir(files, root / CORRUPT)
    files.sync_dir(root)
    yield
    files.sync_dir(root / CORRUPT)
    files.sync_dir(root)


def move_aside(root: Path, steps: Collection[int], *, files: Files) -> dict[int, OSError]:
    """Give each step a name of its own in `.corrupt`; those that cannot be moved, and why."""
    failed: dict[int, OSError] = {}
    for step in sorted(steps):
        name = f"{step_dir_name(step)}-{step:012d}-{secrets.token_hex(4)}"
        try:
            files.rename(step_path(root, step), root / CORRUPT / name)
        except OSError as exc:
            failed[step] = exc
        else:
            logger.warning("step %d is corrupt: moved it to %s/%s", step, CORRUPT, name)
    return failed
