"""A number of a paper beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row.

    Attributes:
        what: the quantity, with its unit.
        source: where the paper's value stands.
        paper: its value; None where it is only drawn.
        ours: what we get.
        note: how ours came about, or why it differs; empty where that is plain.
    """

    what: str
    source: str
    paper: float | None
    ours: float
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.paper is None else self.ours / self.paper
