"""Where one Checkpointer tells what happens: in the log always; in a file, and for Prometheus, if asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_core.observe.event_file import NoEventFile, event_file
from ckpt_core.observe.figures import Figures, LevelFigures
from ckpt_core.observe.log import EventLog
from ckpt_core.observe.metrics import NoMetrics, open_metrics
from ckpt_core.observe.narrator import Narrator
from ckpt_core.types import RankInfo


class Outlets:
    """All of them, closed together.

    Args:
        root: where steps are saved.
        events: what the engine tells.
        info: of this process.
        waited_s: how long training has been inside the engine so far.

    Attributes:
        file: the one in which events are written down.
    """

    def __init__(
        self, root: Path, events: EventLog, info: RankInfo, *, waited_s: Callable[[], float]
    ) -> None:
        self._events, self._info, self._waited_s = events, info, waited_s
        self._narrator = Narrator(root, events, rank=info.rank, waited_s=waited_s)
        self._figures: Figures | None = None
        self._metrics = NoMetrics()
        self.file = NoEventFile()

    def write_down(self, path: str | os.PathLike[str] | None, *, opened: Mapping[str, Any]) -> None:
        """Open the file of events, if there is to be one.

        Args:
            opened: what its first line says of the run, beside its number of ranks.

        Raises:
            ConfigError: it cannot be opened.
        """
        first = {"world_size": self._info.world_size, **opened}
        self.file = event_file(
            path, self._events, rank=self._info.rank, opened=first, waited_s=self._waited_s
        )

    def count(
        self, place: str | None, *, root: str, levels: Callable[[], Sequence[LevelFigures]]
    ) -> None:
        """Count for Prometheus, if somebody asks.

        Raises:
            ConfigError, PersistError: as `open_metrics`.
        """
        if place is None:
            return
        info = self._info
        self._figures = Figures(
            self._events, root=root, rank=info.rank, waited_s=self._waited_s, levels=levels
        )
        self._metrics = open_metrics(
            place, self._figures, rank=info.rank, world_size=info.world_size
        )

    def found(self, steps: Callable[[], Sequence[int]]) -> None:
        """The root is open: which steps it holds, which is asked only where it counts."""
        if self._figures is not None:
            self._figures.found(max(steps(), default=None))

    def close(self) -> None:
        """Tell no more. Idempotent."""
        self.file.close()
        self._metrics.close()
        self._narrator.close()
