"""What a restore asks of levels beyond its root. `ckpt_core.levels` answers; here is only the question."""

from __future__ import annotations

from typing import Protocol

from ckpt_core.restore.reading import Progress


class FurtherLevels(Protocol):
    """Where else steps may be. Asked by the rank that leads a root, inside `restore`."""

    def steps(self) -> dict[int, tuple[str, ...]]:
        """Steps that some level holds whole, with the attempts of their saves, the one that counts first.

        Of several saves of a step that is the one made last; where that cannot be told, the nearest.
        A level that is away counts as empty, with a warning, and is named by `away`.
        """

    def away(self) -> tuple[str, ...]:
        """Which levels the last `steps` could not ask, and why: one text for each."""

    def bring(
        self,
        step: int,
        attempt: str,
        *,
        whole: bool = False,
        keeps: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Make that save of a step a committed step of the root, every byte verified, from the nearest level.

        What the root has of that step is replaced as a whole.

        Args:
            whole: the files of all ranks, also where those of the root's own might do.
            keeps: those of the ranks that the root has now, too: it may be the only place that has them.
            progress: told bytes done and in all, by one thread at a time.

        Raises:
            CorruptCheckpoint: no level holds it whole.
            RestoreError: it cannot be brought now (a level is away, or the disk full).
        """


class NoFurtherLevels:
    """The root is all there is."""

    def steps(self) -> dict[int, tuple[str, ...]]:
        """None."""
        return {}

    def away(self) -> tuple[str, ...]:
        """None."""
        return ()

    def bring(
        self,
        step: int,
        attempt: str,
        *,
        whole: bool = False,
        keeps: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Never called, since there are no steps."""
        raise AssertionError(f"step {step} is nowhere else")
