"""How the tests start the examples, and what they read from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """One life of a job."""

    returncode: int
    output: str

    @property
    def resumed(self) -> int | None:
        """The step that it said it resumed from."""
        match = re.search(r"^resumed from step (\d+)$", self.output, re.MULTILINE)
        return None if match is None else int(match[1])


@dataclass(frozen=True)
class Job:
    """One training job: its root, its result, the one command that starts and resumes it."""

    folder: Path

    @property
    def root(self) -> Path:
        """Directory of its checkpoints."""
        return self.folder / "ckpts"

    @property
    def result(self) -> Path:
        """File of its result."""
        return self.folder / "result.txt"

    def arguments(self, *, steps: int, every: int) -> list[str]:
        """What every example takes."""
        given = ["--root", str(self.root), "--result", str(self.result)]
        return [*given, "--steps", str(steps), "--every", str(every)]
