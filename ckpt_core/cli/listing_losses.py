"""`ls`: what can be lost without losing a step, as far as this node knows, or as all say that are asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_core.cli.listing_levels import Further, LevelRow
from ckpt_core.units import count_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_core.levels import CanLose, Plan

_COPIES = "not whole at their peers: the copies of"


class Row(Protocol):
    """A committed step of the root; its attempt is None where that cannot be read."""

    @property
    def step(self) -> int: ...

    @property
    def attempt(self) -> str | None: ...


@dataclass(frozen=True)
class Losses:
    """What is known of the levels of a root.

    Attributes:
        plan: of its agent.
        seen: URL -> steps that are whole there, with their attempts.
        tell: what can be lost, of a step and its attempt.
        asked: the levels have just been asked.
        silent: those that did not answer, and why.
    """

    plan: Plan
    seen: dict[str, dict[int, str]]
    tell: Callable[[int, str], CanLose | None]
    asked: bool
    silent: dict[str, str] = field(default_factory=dict)

    def of(self, row: Row) -> CanLose | None:
        """What can be lost without losing a step; None: too little is known, or it cannot be read here."""
        return None if row.attempt is None else self.tell(row.step, row.attempt)

    def text(self, row: Row) -> str:
        """The same in a table."""
        found = self.of(row)
        return "?" if found is None else found.what

    def to_json(self, rows: Iterable[Row]) -> dict[str, Any]:
        """The same for programs."""
        found = {row.step: self.of(row) for row in rows}
        told = [{"step": step, **asdict(loss)} for step, loss in found.items() if loss is not None]
        return {"can_lose": told, "silent": self.silent}

    def corrected(self, further: Further | None) -> Further | None:
        """The levels, with what they have just said."""
        if further is None or not self.asked:
            return further
        return replace(further, levels=tuple([self._asked(row) for row in further.levels]))

    def told(self, rows: Iterable[Row]) -> list[str]:
        """Lines below the table: whose copies are missing, and what is not known."""
        lines = [f"{url} did not answer: {why}" for url, why in self.silent.items()]
        unknown: set[str] = set()
        for row in rows:
            loss = self.of(row)
            unknown.update(() if loss is None else loss.unknown)
            if loss is not None and loss.lacking:
                what = "the step or its parity is not at" if self.plan.parity else _COPIES
                lines.append(f"step {row.step}: {what} {', '.join(loss.lacking)}")
        if unknown and not self.asked:
            what = "parity at" if self.plan.parity else "copies of"
            nodes = count_text(len(unknown), "other node")
            lines.append(
                f"what became of the {what} {nodes} is not known here: `ls --ask` asks them"
            )
        return lines

    def _asked(self, row: LevelRow) -> LevelRow:
        there = self.seen.get(row.url)
        return row if there is None else row.having(there)


def losses_of(root: Path, *, ask: bool) -> Losses | None:
    """What is known of the levels of a root; None: it has no plan.

    Args:
        ask: ask all of them now, which may take half a minute.
    """
    from ckpt_core import levels

    plan = levels.read_plan(root)
    if plan is None or not plan.levels:
        return None
    seen, silent = levels.known(plan, levels.read_status(root)), dict[str, str]()
    if ask:
        # Whoever does not answer now is not known any more.
        seen, silent = levels.ask(plan)
    return Losses(plan, seen, levels.can_lose(root, plan, seen), ask, silent)
