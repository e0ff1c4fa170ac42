"""What is asked once all bytes of an import are durable, before they become visible: may it be committed?"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from ckpt_core.coordination import Ballot, Json, NoCoordination
from ckpt_core.errors import CorruptCheckpoint, StagingError

_Identity = tuple[int, int, int, int]


class Consent(NoCoordination):
    """Of one process: given where the source is what it was, and the import was not given up.

    `root` is where it is saved, and may be within the source, or the source within it.

    Its checksums are compared when it is read, and its pages are read again as they are saved: whoever
    writes to it in between would have a step of two saves.

    Attributes:
        within: where that counts; a directory that names others may be the source.
        given: it may be committed from now on.
        given_up: nobody waits for it any more.
    """

    def __init__(self, source: Path, root: Path) -> None:
        self.within = source
        self.given = self.given_up = False
        # Links are not followed here: what they lead to may become another save.
        self._source, self._root = source.absolute(), Path(os.path.realpath(root))
        self._found = self._look()

    def agree(
        self, attempt_id: str, step: int, ballot: Ballot, timeout_s: float
    ) -> tuple[Json, ...]:
        """As `Coordination.agree`. Called from a background thread.

        Raises:
            CorruptCheckpoint: the source has changed.
            StagingError: the import was given up.
        """
        now, within = self._look(), self.within.absolute()
        for path in sorted({*self._found, *now}):
            if path.is_relative_to(within) and self._found.get(path) != now.get(path):
                raise CorruptCheckpoint(
                    f"{path} changed while it was read, and nothing was imported: import it when nobody "
                    f"writes to it, or a copy of it",
                    path=path,
                )
        # Order matters, here as in `withdraw`: one of the two always sees what the other has set.
        self.given = True
        if self.given_up:
            raise StagingError(f"step {step} was given up", step=step)
        return super().agree(attempt_id, step, ballot, timeout_s)

    def _look(self) -> dict[Path, _Identity | None]:
        found = self._source.rglob("*") if self._source.is_dir() else [self._source]
        return {path: _identity(path) for path in found if not self._is_own(path)}

    def _is_own(self, path: Path) -> bool:
        """Whether the root has this for itself, as the files of this import, which have no name yet."""
        real = Path(os.path.realpath(path))
        return real.is_relative_to(self._root) and str(real.relative_to(self._root))[:1] == "."

    def withdraw(self) -> bool:
        """Nobody waits for the import any more; False where it may be committed already."""
        self.given_up = True
        return not self.given


def _identity(path: Path) -> _Identity | None:
    """Differs once somebody has written to the file, or put another in its place. None: there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
