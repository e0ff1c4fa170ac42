"""Locks that a killed build of an extension of torch left, for which later ones wait without a word."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ckpt_core.cli.doctor import Finding, warning

_STALE_S = 3600.0
"""Longer than a build takes."""


def check_builds() -> Iterator[Finding]:
    """What lies where torch compiles DeepSpeed's extensions, on this machine and for this user."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(given or Path.home() / ".cache" / "torch_extensions")
    # One for each extension; torch has a folder for each Python and device above, unless it is told where.
    for pattern in ("*/lock", "*/*/lock"):
        for lock in sorted(folder.glob(pattern)):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > _STALE_S:
                    yield _stale(lock)


def _stale(lock: Path) -> Finding:
    text = f"{lock} is older than an hour: DeepSpeed would wait for it without a word"
    return warning("extensions", text, "delete it, unless somebody is compiling there")
