"""Nodes that keep one another's steps: a loss takes all where it comes before others are made good."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.simulate.costs import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """What a level on the nodes themselves can bear.

    Attributes:
        nodes: of the job.
        group: how many in a row make a group with parity; 0: each node's copy is at the next one.
        spare: how many of a group may be gone at a time.
        refill_s: from the loss of a node until another one has its part, and what it kept for others.
    """

    nodes: int
    group: int = 0
    spare: int = 1
    refill_s: float

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that do not go together."""
        check("refill", self.refill_s)
        if self.nodes < max(self.group, 2) or (self.group and self.nodes % self.group):
            of = f"groups of {self.group}" if self.group else "copies at another node"
            raise ConfigError(
                f"nodes={self.nodes} cannot have {of}: give a multiple, and 2 at least"
            )

    def __str__(self) -> str:
        return f"parity {self.group - self.spare}+{self.spare}" if self.group else "copies"


class Losses:
    """Which nodes of one run are lost and not made good yet."""

    def __init__(self, what: Redundancy) -> None:
        self._what = what
        self._lost: dict[int, float] = {}

    def lose(self, node: int, at_s: float) -> bool:
        """A node is lost; whether that is one too many."""
        what = self._what
        self._lost = {one: then for one, then in self._lost.items() if at_s - then < what.refill_s}
        self._lost[node] = at_s
        if not what.group:
            return any((node + step) % what.nodes in self._lost for step in (-1, 1))
        return sum(one // what.group == node // what.group for one in self._lost) > what.spare
