"""Which checkpoints are under way, as the engine's events tell it from their threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

_KEPT = 5


class Told(Protocol):
    """One event of the engine, as in `ckpt_core.observe.Event`."""

    @property
    def name(self) -> str:
        """Its name, such as "begin"."""

    @property
    def time_s(self) -> float:
        """When, on the monotonic clock."""

    @property
    def seconds(self) -> float:
        """How long it took until then."""

    @property
    def nbytes(self) -> int:
        """How much data."""


class Activity:
    """Filled from any thread by `hear`; read on the training thread after `take`."""

    def __init__(self) -> None:
        self._heard: deque[Told] = deque()
        self._persists: deque[float] = deque(maxlen=_KEPT)
        self.under_way = 0
        self.ended_s = float("-inf")
        self.staging_s = 0.0
        self.state_bytes = 0

    @property
    def hear(self) -> Callable[[Told], object]:
        """Given to the engine's log of events."""
        return self._heard.append  # appending to a deque needs no lock

    @property
    def persist_s(self) -> float:
        """From begin to commit, the usual time; 0 before the first."""
        return median(self._persists) if self._persists else 0.0

    def take(self) -> bool:
        """Bring the attributes up to date; whether a save began since the last time."""
        began = False
        while self._heard:
            event = self._heard.popleft()
            if event.name == "begin":
                began = True
                self.under_way += 1
            elif event.name == "staged":
                self.staging_s = event.seconds
            elif event.name in ("committed", "failed"):
                self.under_way = max(self.under_way - 1, 0)
                self.ended_s = event.time_s
                if event.name == "committed":
                    self._persists.append(event.seconds)
                    self.state_bytes = event.nbytes
        return began

    def seed(self, persist_s: float) -> None:
        """What an earlier run has measured."""
        self._persists.append(persist_s)
