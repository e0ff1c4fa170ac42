"""What a program's file of events tells. The lines are those of `ckpt_core.observe.event_file`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_core.observe import EventLines
from ckpt_core.policy import tuning


class Events:
    """Read step by step, while the program writes.

    Attributes:
        lines: how many there are.
        options: of the first Checkpointer.
        failure: text of the first save that failed; empty if none did.
        nbytes: what each rank stored of its last save.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.options: dict[str, Any] = {}
        self.failure = ""
        self.nbytes: dict[int, int] = {}
        self._saves: list[tuning.Span] = []
        self._begins: list[tuple[int, float]] = []
        self._barriers: list[float] = []
        self._file = EventLines()

    @property
    def commits(self) -> int:
        """Of the first rank."""
        return len(self._saves)

    @property
    def barriers(self) -> int:
        """Of the first rank."""
        return len(self._barriers)

    def read(self, path: Path) -> None:
        """Take in whatever whole lines have come since the last time."""
        for line in self._file.read(path):
            self.lines += 1
            self._take(line)

    def trace(self) -> tuning.Trace:
        """As the first rank tells it."""
        return tuning.Trace(
            tuple(self._saves),
            tuning.iterations_of(self._barriers, self._begins),
            self.nbytes.get(0, 0),
        )

    def _take(self, line: dict[str, Any]) -> None:
        name, now_s = line["name"], line["time_s"]
        if name == "committed":
            self.nbytes[line["rank"]] = line["nbytes"]
        elif name == "failed":
            self.failure = self.failure or line["detail"] or "no reason given"
        if line["rank"] != 0:
            return
        if name == "committed":
            self._saves.append((now_s - line["seconds"], now_s))
        elif name == "begin":
            self._begins.append((line["step"], now_s))
        elif name == "barrier":
            self._barriers.append(now_s)
        elif name == "opened" and not self.options:
            self.options = line["options"]
