"""The protocol of ways and what several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from ckpt_core.bench.contenders import Handle, State


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank of a way works.

    Attributes:
        root: existing directory of this way; all ranks have the same.
        rank: of this process.
        world_size: of the job.
        staging_bytes: bound of staging memory for ways that have one; None is their default.
        timeout_s: deadline of any wait.
    """

    root: Path
    rank: int
    world_size: int
    staging_bytes: int | None
    timeout_s: float


class Way(Protocol):
    """One way to save the state of several ranks.

    Attributes:
        name: as in the registry.
        fsyncs: "yes" when a completed save survives a power cut, else what is missing.
        stands_for: what it corresponds to in DeepFreeze, or what it is.
    """

    name: ClassVar[str]
    fsyncs: ClassVar[str]
    stands_for: ClassVar[str]

    def __init__(self, place: Place) -> None: ...

    @classmethod
    def obstacle(cls) -> str | None:
        """Why it cannot run here, or None."""

    @classmethod
    def release(cls) -> str:
        """Release of the package that does the work."""

    @property
    def settings(self) -> str:
        """Settings in words, for the report."""

    def save(self, state: State, step: int) -> Handle:
        """Start to save; every rank calls it."""

    def persisted_s(self) -> float | None:
        """Seconds until the last save's bytes of this rank were durable, if it knows."""

    def file_bytes(self) -> int:
        """Length of all files that this rank wrote for the newest step."""

    def tidy(self) -> None:
        """Remove older steps than the newest; never timed."""

    def load_into(self, state: State) -> None:
        """Fill the live tensors of this rank from the newest step; every rank calls it."""

    def close(self) -> None:
        """Release everything; every rank calls it; idempotent."""


def bytes_of(paths: list[Path]) -> int:
    """Length of all these files together."""
    return sum(path.stat().st_size for path in paths)
