"""What can be told: one change of state each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckpt_core.errors import ConfigError


class EventName(StrEnum):
    """Every change of state that is told.

    The life of a save is BEGIN, STAGED, PERSISTED (the files of this rank are synced), COMMITTED, or FAILED
    at any point. WAITED is time that the training thread lost, RESTORED a restore, RETIRED a step that
    retention took. Of a further level, which `detail` names: LEVEL_REACHED, a step is whole there;
    LEVEL_PASSED_OVER, it never will be; LEVEL_PROBLEM, the level cannot go on (or, with nothing but its URL,
    goes on again).
    """

    BEGIN = "begin"
    STAGED = "staged"
    PERSISTED = "persisted"
    COMMITTED = "committed"
    RETIRED = "retired"
    FAILED = "failed"
    RESTORED = "restored"
    WAITED = "waited"
    LEVEL_REACHED = "level_reached"
    LEVEL_PASSED_OVER = "level_passed_over"
    LEVEL_PROBLEM = "level_problem"


@dataclass(frozen=True, slots=True)
class Event:
    """One change of state.

    Attributes:
        name: what happened: an `EventName`, or its text.
        step: optimizer step concerned, if any.
        attempt: id of the save concerned, if any; the same on all ranks.
        time_s: when it was done, on the monotonic clock.
        seconds: how long it took until then.
        nbytes: how much data it was about.
        detail: for people: a reason, the text of an error.
    """

    name: str
    time_s: float
    step: int | None = None
    attempt: str | None = None
    seconds: float = 0.0
    nbytes: int = 0
    detail: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "name", EventName(self.name))
        except ValueError as exc:
            known = ", ".join(EventName)
            raise ConfigError(f"event name {self.name!r} is unknown: it is one of {known}") from exc
