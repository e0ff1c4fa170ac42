"""A file of an earlier copy gets one more name in a directory that is a level."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)

PART = ".part"
"""How names end of what is being made."""


def link(
    files: Files, source: Path, target: Path, *, nbytes: int, is_it: Callable[[], bool]
) -> bool:
    """Make `target` the file `source`, if that has so many bytes; False where that cannot be.

    What had that name before is replaced. The name is durable with the next sync of its directory.

    Args:
        is_it: asked behind the link: whether `source` was what it should be.
    """
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART}")
    try:
        files.link(source, fresh)
        found = os.lstat(fresh)
        done = stat.S_ISREG(found.st_mode) and found.st_size == nbytes and is_it()
        if done:
            files.rename(fresh, target)
    except OSError as exc:
        logger.info("%s is sent and not linked: %s", target, exc)
        done = False
    # Gone already, or two names of one file, of which a rename takes none.
    with suppress(OSError):
        files.unlink(fresh)
    return done


def sync_below(files: Files, path: Path, top: Path) -> None:
    """Make the name of a file durable, in each folder up to `top`."""
    for folder in path.parents:
        files.sync_dir(folder)
        if folder == top:
            break
