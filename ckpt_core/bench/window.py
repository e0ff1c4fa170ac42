"""The steps of one measured window of training, as every suite that trains has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Steps in a row, counted from 1; the last ones are under the clock.

    Attributes:
        every: a save after each `every`-th step, the first one under the clock among them; 0: never.
        lead: steps before the clock starts.
        steps: steps under the clock; a multiple of `every`, so that the last save holds up as many steps as
            the others.
        warm_saves: a save after each of so many first steps too: memory and files are new then.
    """

    every: int
    lead: int
    steps: int
    warm_saves: int = 0

    def due(self, step: int) -> bool:
        """Whether there is a save after this step."""
        if step <= self.warm_saves:
            return True
        return self.every > 0 and (step - self.lead - 1) % self.every == 0

    @property
    def saves(self) -> int:
        """All saves of the window, those of its lead among them."""
        return sum(self.due(step) for step in range(1, self.lead + self.steps + 1))

    @property
    def timed_saves(self) -> int:
        """Those under the clock, of which there are some."""
        return self.steps // self.every
