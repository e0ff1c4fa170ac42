"""The one question, and how answers combine."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

from ckpt_core.policy.meter import gauges_of
from ckpt_core.types import check_step

_log = logging.getLogger("ckpt_core")


class Policy(ABC):
    """Decides at which steps to save. Called by the training thread alone, at every step."""

    def should_save(self, step: int) -> bool:
        """Whether to save now; a yes counts as saved, for every part of a combined policy.

        Called after each optimizer step, in ascending order. A lower step than before means that
        training went back (a restore): policies of steps start anew from there, and clocks go on.

        Raises:
            ConfigError: `step` is no step.
        """
        step = check_step(step)
        if not self.due(step):
            return False
        self.saved(step)
        return True

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether this policy wants a save now; asking again gives the same answer."""

    @abstractmethod
    def saved(self, step: int) -> None:
        """A save of `step` starts, wanted by this policy or by one that it is combined with."""

    def watch(self, checkpointer: Any, *, agree: bool = True) -> None:  # noqa: B027
        """For policies that measure or read a clock, see `Auto.watch`; others take no notice."""

    def _see(self, checkpointer: Any, *, agree: bool) -> None:
        """As `watch`, of a part of a combined policy: that one looks whether all of it fits the levels."""
        self.watch(checkpointer, agree=agree)

    def _is_regular(self) -> bool | None:
        """Whether multiples of a number are saved, whatever number; False: only by chance. None: unknown."""
        return None

    def _look_at_levels(self, checkpointer: Any) -> None:
        """Say at once which levels get hardly a step: after a loss it is too late."""
        gauges = gauges_of(checkpointer)
        for url, every in gauges.every.items() if gauges.rank == 0 else ():
            if every > 1 and self._is_regular() is False:
                _log.warning(
                    "%r saves at steps that are multiples of nothing, and every=%d lets multiples of %d "
                    "alone go to the level %s: hardly any will. Leave its every at 1, or save those as well, "
                    "with EveryNSteps(%d) | ...",
                    *(self, every, every, url, every),
                )

    def __or__(self, other: object) -> Policy:
        """Save when either wants to; a save counts for both."""
        if not isinstance(other, Policy):
            return NotImplemented
        return _Combined(self, other, every=False)

    def __and__(self, other: object) -> Policy:
        """Save when both want to; a wish lasts until a save is made."""
        if not isinstance(other, Policy):
            return NotImplemented
        return _Combined(self, other, every=True)


class _Combined(Policy):
    def __init__(self, first: Policy, second: Policy, *, every: bool) -> None:
        self._parts = (first, second)
        self._every = every

    def __repr__(self) -> str:
        sign = "&" if self._every else "|"
        return f"({self._parts[0]!r} {sign} {self._parts[1]!r})"

    def watch(self, checkpointer: Any, *, agree: bool = True) -> None:
        self._see(checkpointer, agree=agree)
        self._look_at_levels(checkpointer)

    def _see(self, checkpointer: Any, *, agree: bool) -> None:
        for part in self._parts:
            part._see(checkpointer, agree=agree)

    def _is_regular(self) -> bool | None:
        answers = [part._is_regular() for part in self._parts]
        # With `&` a wish waits for the other one, so that one that is irregular makes all of it so.
        order = (False, True) if self._every else (True, False)
        return next((answer for answer in order if answer in answers), None)

    def due(self, step: int) -> bool:
        # Every part is asked, since the first question sets its origin.
        answers = [part.due(step) for part in self._parts]
        return all(answers) if self._every else any(answers)

    def saved(self, step: int) -> None:
        for part in self._parts:
            part.saved(step)
