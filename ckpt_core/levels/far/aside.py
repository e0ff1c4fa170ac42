"""What loses its name in a directory that is a level: it lies aside until its bytes go."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from ckpt_core.levels.far.looking import age_s
from ckpt_core.store import CORRUPT, INFLIGHT, ensure_dir, is_real_dir, remove_tree
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)

_RETIRED = ".retired"
_SUPERSEDED = (_RETIRED, ".replaced")
"""What lies in `.inflight` under these, once `bring_back` has run, has lost its name."""

_YOUNG_S = 3600.0
"""Copies of others in which nothing was written for longer are given up."""


class Aside:
    """Moves away what is not to be there any more. Whoever has names change holds the lock of the root."""

    def __init__(self, root: Path, *, url: str, files: Files) -> None:
        self._root, self._url, self._files = root, url, files

    def retire(self, name: str) -> Path:
        """Take a name away; where its files are now. Raises OSError."""
        ensure_dir(self._files, self._root / INFLIGHT)
        aside = self._root / INFLIGHT / f"{secrets.token_hex(8)}{_RETIRED}"
        self._files.rename(self._root / name, aside)
        return aside

    def quarantine(self, name: str) -> None:
        """Take away, durably, what cannot be read as a step; nothing of it is deleted. Raises OSError."""
        ensure_dir(self._files, self._root / CORRUPT)
        self._files.sync_dir(self._root)
        aside = self._root / CORRUPT / f"{name}-{secrets.token_hex(4)}"
        self._files.rename(self._root / name, aside)
        self._files.sync_dir(self._root / CORRUPT)
        self._files.sync_dir(self._root)
        logger.warning("%s: %s cannot be read as a step: moved it to %s", self._url, name, aside)

    def is_over(self, path: Path) -> bool:
        """Whether what lies in `.inflight` there has lost its name, or was given up by others."""
        return path.suffix in _SUPERSEDED or age_s(path) > _YOUNG_S

    def delete(self, path: Path) -> None:
        """Give space back; what cannot be deleted is swept later."""
        try:
            if path.suffix not in ("", _RETIRED) and is_real_dir(path):
                # What was replaced has a name that `bring_back` knows: it loses it before its files go.
                gone = path.with_name(f"{secrets.token_hex(8)}{_RETIRED}")
                self._files.rename(path, gone)
                path = gone
            remove_tree(self._files, path)
        except OSError as exc:
            logger.warning("could not delete %s: %s; it takes space only", path, exc)
