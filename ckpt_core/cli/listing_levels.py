"""`ls`: at which further levels the steps of a root are, as its agent has last said. Asks no level."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.text import age_text
from ckpt_core.store import writer_of
from ckpt_core.units import count_text

if TYPE_CHECKING:
    from ckpt_core.levels import LevelStatus, Plan, Status
    from ckpt_core.options import Level


@dataclass(frozen=True)
class LevelRow:
    """A further level; `sending` is the step on its way there, or None; `attempts` are those of `steps`."""

    number: int
    url: str
    every: int
    steps: tuple[int, ...] = ()
    attempts: tuple[str, ...] = ()
    sending: int | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    problem: str | None = None
    since_unix_s: float | None = None

    def having(self, there: Mapping[int, str]) -> LevelRow:
        """With these saves whole there: step -> attempt."""
        steps = sorted(there)
        return replace(self, steps=tuple(steps), attempts=tuple([there[step] for step in steps]))


@dataclass(frozen=True)
class Further:
    """All further levels of a root.

    Attributes:
        levels: in their order.
        agent: who takes steps there now; None: nobody does.
        told_unix_s: when the agent last said how far it is; None: it has said nothing.
        ended: why it ended; None if it did not say so.
    """

    levels: tuple[LevelRow, ...]
    agent: dict[str, Any] | None
    told_unix_s: float | None
    ended: str | None

    def elsewhere(self, here: set[int]) -> list[int]:
        """Steps that the root does not have, and some level does."""
        return sorted({step for level in self.levels for step in level.steps} - here)

    def cell(self, step: int, attempt: str | None) -> str:
        """Which levels have a step, in a table, with what is on its way: `1, 2 at 45%`.

        Args:
            attempt: of the root's save of it; None: it has none, or one that cannot be read.
        """
        told = []
        for level in self.levels:
            there = dict(zip(level.steps, level.attempts, strict=True)).get(step)
            if there is not None and attempt in (None, there):
                told.append(str(level.number))
            elif level.sending == step:
                part = level.sent_bytes / level.total_bytes if level.total_bytes else 0.0
                told.append(f"{level.number} at {part:.0%}")
            elif there is not None:
                told.append(f"{level.number} has another save of it")
        return ", ".join(told)


def further_levels(root: Path) -> Further | None:
    """What is known of them; None when the root has none."""
    from ckpt_core.levels import LEVELS, read_plan, read_status

    folder = root / LEVELS
    plan = read_plan(root) if folder.is_dir() else None
    if plan is None or not plan.levels:
        return None
    status = read_status(root)
    return Further(
        levels=_rows(plan, status),
        agent=writer_of(folder),
        told_unix_s=None if status is None else status.written_s,
        ended=(status.ended if status is not None else "") or None,
    )


def told(further: Further) -> list[str]:
    """Lines below the table."""
    now = time.time()
    return [*[_level_text(level, now) for level in further.levels], _agent_text(further, now)]


def _rows(plan: Plan, status: Status | None) -> tuple[LevelRow, ...]:
    known = {} if status is None else {level.url: level for level in status.levels}
    return tuple(
        [_row(number, one, known.get(one.url)) for number, one in enumerate(plan.levels, 1)]
    )


def _row(number: int, level: Level, status: LevelStatus | None) -> LevelRow:
    row = LevelRow(number, level.url, level.every)
    if status is None:
        return row
    return replace(
        row.having(status.steps),
        sending=status.sending,
        sent_bytes=status.sent_bytes,
        total_bytes=status.total_bytes,
        problem=status.problem or None,
        since_unix_s=status.since_s or None,
    )


def _level_text(level: LevelRow, now: float) -> str:
    text = f"level {level.number}, every {level.every}: {level.url}, {count_text(len(level.steps), 'step')}"
    if level.problem is not None:
        since = (
            "" if level.since_unix_s is None else f" (since {age_text(now - level.since_unix_s)})"
        )
        text += f"; {level.problem}{since}"
    return text


def _agent_text(further: Further, now: float) -> str:
    told_s = further.told_unix_s
    age = "nothing is known of the levels yet"
    if told_s is not None:
        age = f"levels as they were {age_text(now - told_s)}"
    if further.agent is not None:
        where = further.agent.get("host", "another host")
        return f"{age}; the agent runs, pid {further.agent['pid'] or 'unknown'} on {where}"
    if further.ended is not None:
        return f"{age}; the agent has ended: {further.ended}"
    return f"{age}; no agent runs: the next start of the job goes on, or `ckpt-core agent ROOT`"
