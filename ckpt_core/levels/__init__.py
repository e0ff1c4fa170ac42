"""Further roots of a run: where committed steps are taken to behind training, and brought back from.

    Level(url, every=, keep_last=, ...)      what a user says (`ckpt_core.options`)
    open_far(url)                            the door to one level: a directory, or an object store
    agent                                    takes committed steps on: copy, verify, publish, retire
    mailbox                                  what the Checkpointer and the agent tell one another
    errands                                  what needs a connection, done by a process of its own

Idea: a level is a root, and every root has the same format. The engine commits to the first one and never
hears of the others; an agent, one for each root, takes what is committed on, and outlives the trainer. A
restore takes the newest step that is whole anywhere: it brings it to the first root, and reads it there.

Source: DeepFreeze and VeloC (levels, flushed behind the application), Gemini (SOSP '23, memory first).
"""

from __future__ import annotations

from ckpt_core.levels.far import Away, Conflict, Copy, Far, Word
from ckpt_core.levels.mailbox import (
    LEVELS,
    LevelStatus,
    Plan,
    Status,
    read_plan,
    read_status,
    write_plan,
    write_status,
)
from ckpt_core.levels.opening import check_extra, open_far
from ckpt_core.levels.wants import meets, wanted

__all__ = [
    "LEVELS",
    "Away",
    "Conflict",
    "Copy",
    "Far",
    "LevelStatus",
    "Plan",
    "Status",
    "Word",
    "check_extra",
    "meets",
    "open_far",
    "read_plan",
    "read_status",
    "wanted",
    "write_plan",
    "write_status",
]
