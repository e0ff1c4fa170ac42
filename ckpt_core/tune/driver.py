"""Who trains and saves while the tuner watches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ckpt_core.policy import tuning

NEVER = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of training with one candidate.

    Attributes:
        candidate: the settings; None: those that the program has by itself.
        every: steps between saves; `NEVER`: none.
        saves: ends after so many commits; 0: `iterations` counts.
        iterations: ends after so many.
    """

    candidate: tuning.Candidate | None
    every: int
    saves: int = 0
    iterations: int = 0


class Driver(ABC):
    """Runs turns, one at a time; whoever made it closes it.

    Attributes:
        chooses_interval: `Turn.every` is obeyed; otherwise the program saves as it likes.
    """

    chooses_interval: bool = True

    @abstractmethod
    def run(self, turn: Turn) -> tuning.Trace:
        """Train as `turn` says, from the start; when it returns nothing runs or is in flight any more.

        Raises:
            CkptError: a save failed.
            ConfigError: the program did not do what it must.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all that it owns."""
