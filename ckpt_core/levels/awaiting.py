"""Which committed steps of a root are still to be taken on: retention leaves those alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.levels.mailbox import LevelStatus
from ckpt_core.levels.wants import wanted
from ckpt_core.options import Level
from ckpt_core.store import step_path


def awaited(
    here: Mapping[int, str], levels: Sequence[Level], seen: Sequence[LevelStatus | None]
) -> set[int]:
    """Steps of the root that some level still wants, and that no directory before that level holds. Pure.

    Of each level the newest `backlog`, and the one that is on its way.

    Args:
        here: committed steps of the root, with their attempts.
        seen: what is known of each level; None: nothing, so that it may want all.
    """
    stay: set[int] = set()
    held: dict[int, str] = {}
    for level, status in zip(levels, seen, strict=True):
        there = {} if status is None else status.steps
        open_ones = {step: attempt for step, attempt in here.items() if held.get(step) != attempt}
        stay.update(wanted(open_ones, level, there=there))
        if status is not None:
            stay.update(step for step in here if step == status.sending)
        if level.scheme is None:
            # It is the source of what comes after.
            held.update(there)
    return stay


class Attempts:
    """The attempts of committed steps of a root, each manifest read once. Used by one thread at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[int, tuple[object, str]] = {}

    def of(self, steps: Sequence[int]) -> dict[int, str]:
        """step -> attempt; "", which is nobody's, for one that cannot be read."""
        found = {step: self._of(step) for step in steps}
        self._known = {step: self._known[step] for step in steps if step in self._known}
        return found

    def _of(self, step: int) -> str:
        path = step_path(self._root, step) / MANIFEST_NAME
        try:
            stat = path.stat()
            sign = (stat.st_ino, stat.st_mtime_ns)
            known = self._known.get(step)
            if known is None or known[0] != sign:
                manifest = Manifest.decode(path.read_bytes(), path=path)
                known = self._known[step] = (sign, manifest.attempt)
            return known[1]
        except (OSError, CkptError):
            return ""
