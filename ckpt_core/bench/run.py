"""One run of a suite, as every part of it sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import RunSettings

S = TypeVar("S", bound=RunSettings)


def _nobody(row: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Run(Generic[S]):
    """What is measured, where, and who is told.

    Attributes:
        settings: of the suite.
        report: filled while it runs.
        folder: empty at the beginning, and gone at the end.
        notify: told what happens next, for a progress line.
        known: told a row of figures that is in the report now, by suites that run for long.
    """

    settings: S
    report: Report
    folder: Path
    notify: Callable[[str], None]
    known: Callable[[str], None] = _nobody
