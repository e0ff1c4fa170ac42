"""What is to be known of a framework to check it: torch's is here, each integration brings its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.cli.doctor.finding import Finding
from ckpt_core.system import plugins

GROUP = "ckpt_core.doctor"
"""Entry points, each a `Framework`."""

Judge = Callable[[Mapping[str, Any]], Iterable[Finding]]
JudgeJob = Callable[[Path | None, Sequence[Path]], list[Finding]]


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework. Made without importing it: a broken one breaks no check.

    Attributes:
        name: of its module and its distribution.
        needs: the module that a job imports for it: the integration.
        install: how to get it.
        place: among the others in the answer, lowest first.
        program: imports what a job would, in a process of its own; may leave facts in the dict `told`.
        judge: looks at those facts.
        absent: what to say where it is not installed, and whether the user asked about a job of it; None: no
            more than that.
        judge_job: looks at a configuration and at scripts of a job, which are read before anything else is
            done; None: it has nothing to look for in them. Raises ConfigError or OSError for a file that
            cannot be read.
    """

    name: str
    needs: str
    install: str
    place: int
    program: str
    judge: Judge = lambda told: ()
    absent: Callable[[bool], Finding | None] = lambda asked: None
    judge_job: JudgeJob | None = None


def frameworks() -> list[Framework]:
    """Those that have an integration, whether they are installed or not, in their order."""
    found: list[Framework] = [plugins.load(GROUP, name) for name in plugins.names(GROUP)]
    return sorted(found, key=lambda one: (one.place, one.name))
