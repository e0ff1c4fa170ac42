"""What a check gives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is.

    OK: all is well. NOTE: worth knowing. WARNING: it works, and not as well or not as safely as it could.
    PROBLEM: checkpoints would fail, or not be this engine's.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer.

    Attributes:
        check: what was looked at.
        found: what is there.
        advice: what to do; None: nothing.
    """

    check: str
    level: Level
    found: str
    advice: str | None = None


def ok(check: str, found: str) -> Finding:
    """OK."""
    return Finding(check, Level.OK, found)


def note(check: str, found: str, advice: str | None = None) -> Finding:
    """NOTE."""
    return Finding(check, Level.NOTE, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    """WARNING."""
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """PROBLEM."""
    return Finding(check, Level.PROBLEM, found, advice)
