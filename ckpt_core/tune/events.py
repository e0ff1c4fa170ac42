"""What a program's file of events tells. The lines are those of `ckpt_core.observe.event_file`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_core.observe import EventLines
from ckpt_core.policy import tuning


@dataclass
class _Run:
    """What one rank tells of one Checkpointer, from its opening on."""

    options: dict[str, Any] = field(default_factory=dict)
    saves: list[tuning.Span] = field(default_factory=list)
    begins: list[tuple[int, float]] = field(default_factory=list)
    barriers: list[float] = field(default_factory=list)
    nbytes: int = 0


class Events:
    """Read step by step, while the program writes.

    A program may open several Checkpointers, in turn or at once. The one that has saved most is the one that
    is tuned, and all that is told here is of it: steps of two runs come to no iteration.

    Attributes:
        lines: how many there are.
        options: of the Checkpointer that is tuned.
        failure: text of the first save that failed; empty if none did.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.options: dict[str, Any] = {}
        self.failure = ""
        self._runs: dict[int, dict[str, _Run]] = {}
        self._file = EventLines()

    @property
    def nbytes(self) -> dict[int, int]:
        """What each rank stored of its last save."""
        return {rank: run.nbytes for rank in self._runs if (run := self._main(rank)).saves}

    @property
    def commits(self) -> int:
        """Of the first rank."""
        return len(self._main().saves)

    @property
    def barriers(self) -> int:
        """Of the first rank."""
        return len(self._main().barriers)

    def read(self, path: Path) -> None:
        """Take in whatever whole lines have come since the last time."""
        for line in self._file.read(path):
            self.lines += 1
            self._take(line)

    def trace(self) -> tuning.Trace:
        """As the first rank tells it."""
        run = self._main()
        iterations = tuning.iterations_of(run.barriers, run.begins)
        return tuning.Trace(tuple(run.saves), iterations, run.nbytes)

    def _main(self, rank: int = 0) -> _Run:
        runs = self._runs.get(rank, {}).values()
        return max(runs, key=lambda run: (len(run.saves), len(run.barriers)), default=_Run())

    def _take(self, line: dict[str, Any]) -> None:
        name, now_s = line["name"], line["time_s"]
        runs = self._runs.setdefault(line["rank"], {})
        # A program that brings an older release of ours names no openings.
        run = runs.setdefault(line.get("opening", ""), _Run())
        if name == "committed":
            run.nbytes = line["nbytes"]
            run.saves.append((now_s - line["seconds"], now_s))
        elif name == "failed":
            self.failure = self.failure or line["detail"] or "no reason given"
        elif name == "begin":
            run.begins.append((line["step"], now_s))
        elif name == "barrier":
            run.barriers.append(now_s)
        elif name == "opened" and not run.options:
            run.options = line["options"]
        if name in ("opened", "committed") and line["rank"] == 0:
            self.options = self._main().options
