"""The one question, and how answers combine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ckpt_core.types import check_step


class Policy(ABC):
    """Decides at which steps to save. Called by the training thread alone, at every step."""

    def should_save(self, step: int) -> bool:
        """Whether to save now; a yes counts as saved, for every part of a combined policy.

        Called after each optimizer step, in ascending order. A lower step than before means that
        training went back (a restore), and the policy starts anew from there.

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
        for part in self._parts:
            part.watch(checkpointer, agree=agree)

    def due(self, step: int) -> bool:
        # Every part is asked, since the first question sets its origin.
        answers = [part.due(step) for part in self._parts]
        return all(answers) if self._every else any(answers)

    def saved(self, step: int) -> None:
        for part in self._parts:
            part.saved(step)
