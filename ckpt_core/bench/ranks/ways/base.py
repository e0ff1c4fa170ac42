"""What a way to save has besides what every contender has."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.contenders import Contender

MEMORY = "memory"
"""Where the directories of teams are: a link to one on a filesystem in memory."""


class Way(Contender):
    """One way to save the state of several ranks; every rank calls every method.

    Attributes:
        stands_for: what it corresponds to in DeepFreeze, or what it is.
    """

    stands_for: ClassVar[str]

    def persisted_s(self) -> float | None:
        """Seconds until the last save's bytes of this rank were durable, if it knows."""
        return None

    @abstractmethod
    def file_bytes(self) -> int:
        """Length of all files that this rank wrote for the newest step."""


def memory_of(files: Path) -> Path:
    """That of a team, by where it keeps its files; nothing may be there."""
    return files.parents[1] / MEMORY


def bytes_of(paths: list[Path]) -> int:
    """Length of all these files together."""
    return sum(path.stat().st_size for path in paths)
