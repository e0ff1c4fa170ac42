"""Files that a level has already, since they are those of the copy that was sent last."""

from __future__ import annotations

from ckpt_core.layout import FileEntry
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.door import Copy


class SentBefore:
    """What was sent to one level last. For one thread.

    A file of the next save is the same one if it is another name of it here, and its checksums say that its
    bytes are those that were sent. So a level renews a file when the root does, and damage there to one of
    them harms the same steps as here.
    """

    def __init__(self) -> None:
        self._copy: Copy | None = None
        self._files: dict[tuple[int, int], FileEntry] = {}

    def note(self, save: OpenSave) -> None:
        """All of it has been sent."""
        self._files = {save.which(entry.name): entry for entry in save.entries}
        self._copy = save.copy

    def forget(self, save: OpenSave, entry: FileEntry) -> None:
        """That file is wrong there."""
        self._files.pop(save.which(entry.name), None)

    def file(self, save: OpenSave, entry: FileEntry) -> tuple[Copy, str] | None:
        """Where a file of a save is there already; None: nowhere that is known."""
        known = self._files.get(save.which(entry.name))
        if self._copy is None or known is None or known.chunks != entry.chunks:
            return None
        if any(chunk.xxh3 is None for chunk in entry.chunks):
            return None
        return self._copy, known.name
