"""`LastSaved`: what a Checkpointer has saved last, which need not have the highest number in its root."""

from __future__ import annotations

from ckpt_core.levels.far.door import Copy
from ckpt_core.save import Followed


class LastSaved:
    """Of steps, or of directories of files: these have a number in common. For the training thread."""

    def __init__(self) -> None:
        self._saves: list[Followed] = []

    def note(self, save: Followed) -> None:
        """A save has begun."""
        done = self._done()
        kept = [one for one in self._saves if one in done or not one.committed.done()]
        self._saves = [*kept, save]

    def copies(self) -> tuple[Copy, ...]:
        """What has been committed of it; (): nothing has."""
        return tuple(
            [
                Copy(one.step, one.attempt, None if to is None else to.directory)
                for one in self._done()
                for to in (one.destination,)
            ]
        )

    def _done(self) -> list[Followed]:
        done = [one for one in self._saves if one.has_committed]
        last = {
            None if one.destination is None else one.destination.directory: one
            for one in done
            if one.step == done[-1].step
        }
        return [*last.values()]
