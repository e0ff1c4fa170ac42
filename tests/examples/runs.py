"""How the tests start the examples, and what they read from them."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

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


LIMIT_S = 240


@dataclass(frozen=True)
class Torchrun(Job):
    """A job of several ranks under torchrun."""

    example: Path
    steps: int
    every: int
    ranks: int = 2

    def run(self, *, kill_after: int | None = None, seed: int = 0) -> tuple[int, str]:
        """The command to its end, or until a rank is killed: so many losses after a commit."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.ranks), str(self.example)]
        command += self.arguments(steps=self.steps, every=self.every)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            before, output, told = self._committed(), "", 0
            try:
                for line in process.stdout:
                    output += line
                    told += line.startswith("step ") and self._committed() > before
                    if told == kill_after:
                        self._kill_one(process.pid, seed)
                        kill_after = None
                process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                    process.kill()
        return process.returncode, output

    def _committed(self) -> int:
        """When the newest commit was written."""
        newest = 0
        for path in self.root.glob("*/manifest.json"):
            with contextlib.suppress(FileNotFoundError):  # retired meanwhile
                newest = max(newest, path.stat().st_mtime_ns)
        return newest

    def _kill_one(self, launcher: int, seed: int) -> None:
        ranks = [
            child
            for child in psutil.Process(launcher).children()
            if self.example.name in " ".join(child.cmdline())
        ]
        if ranks:
            chosen = random.Random(seed).choice(sorted(ranks, key=lambda child: child.pid))
            chosen.send_signal(signal.SIGKILL)


def resumed_steps(output: str) -> list[int]:
    """The steps that ranks said they resumed from."""
    return [int(step) for step in re.findall(r"^resumed from step (\d+)$", output, re.MULTILINE)]
