"""What `ckpt-core doctor` answered, for its tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
Cli = Callable[..., Any]


@dataclass(frozen=True)
class Diagnosis:
    """An answer of `--json`."""

    code: int
    found: dict[str, Any]

    def of(self, check: str) -> list[tuple[str, str]]:
        """Level and text, with the advice, of what was found by a check."""
        return [
            (item["level"], f"{item['found']}; {item['advice'] or ''}")
            for item in self.found["checks"]
            if item["check"] == check
        ]

    def one(self, check: str) -> tuple[str, str]:
        """The same of a check that found one thing."""
        (only,) = self.of(check)
        return only

    @property
    def bad(self) -> list[str]:
        """Checks that found a problem."""
        return [item["check"] for item in self.found["checks"] if item["level"] == "problem"]


@dataclass(frozen=True)
class Ended:
    """What a process left."""

    code: int
    out: str
    err: str


def ended(*command: object) -> Ended:
    """Run a command until its end."""
    made = subprocess.run(
        [*map(str, command)], cwd=TOP, capture_output=True, text=True, timeout=60, check=False
    )
    return Ended(made.returncode, made.stdout, made.stderr)


def diagnosis(run: Cli, *arguments: object, **environ: str) -> Diagnosis:
    """Run `doctor ARGUMENTS --json`; its exit code says whether there is a problem."""
    answer = run("doctor", *arguments, "--json", **environ)
    assert answer.code in (0, 1), answer.err
    made = Diagnosis(answer.code, json.loads(answer.out))
    assert made.code == (1 if made.bad else 0)
    return made
