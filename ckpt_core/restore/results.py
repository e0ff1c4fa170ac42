"""What a restore says: to its caller, as a warning, and to the owner of the root."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ckpt_core.units import count_text, html_table, size_text


class Hold(Protocol):
    """What keeps a step in its place, while somebody has it."""

    def release(self) -> None:
        """The step is read."""


class Guard(Protocol):
    """What restore tells the owner of the root (a StepStore)."""

    def protect(self, step: int) -> Hold:
        """This process begins to read a step: it must not be retired while the result is kept."""

    def suspect(self, step: int) -> None:
        """A step was found corrupt, or was passed over because another node has lost it."""


class NoGuard:
    """For readers that do not own the root: another process may retire what they read."""

    def protect(self, step: int) -> Hold:
        """Nothing is kept."""
        return self

    def release(self) -> None:
        """Nothing to do."""

    def suspect(self, step: int) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class RestoredStep:
    """A step that was restored.

    Attributes:
        step: its number.
        path: its directory.
        state: the tree as loaded, for plain values such as counters; its tensors are the live ones.
        skipped: newer steps that could not be used, newest first, and why.
        read_bytes: bytes that this process read from shard files.
        world_size: how many ranks saved it.
        borrowed_from: the rank whose private values were taken, because the step (or this root) has none
            of this rank; None: they are its own.
        left_out: with `partial`, each place where checkpoint and state differ, which is as it was before,
            and how they differ.
    """

    step: int
    path: Path
    state: Any = field(repr=False)
    skipped: tuple[tuple[int, str], ...] = ()
    read_bytes: int = 0
    world_size: int = 1
    borrowed_from: int | None = None
    left_out: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """For notebooks: what was restored, and why nothing newer."""
        ranks = count_text(self.world_size, "rank")
        whose = (
            "" if self.borrowed_from is None else f", private values of rank {self.borrowed_from}"
        )
        rows = {"from": self.path, "read": size_text(self.read_bytes), "saved by": ranks + whose}
        passed_over = {f"step {step} passed over": why for step, why in self.skipped}
        left_out = {"left as they were": "; ".join(self.left_out)} if self.left_out else {}
        return html_table(f"Restored step {self.step}", rows | passed_over | left_out)
