"""All suites, found by name, behind the same verbs: run, render, plot, write.

This package's own are modules here; those of the integrations live beside what they measure and are found
through entry points of the group `ckpt_core.bench`: name of the suite -> its `Suite`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import RunSettings
from ckpt_core.bench.suite import Suite
from ckpt_core.errors import ConfigError
from ckpt_core.system import plugins

GROUP = "ckpt_core.bench"
_OWN = ("core", "ranks", "policy", "papers", "device", "levels")


def names() -> tuple[str, ...]:
    """Of all suites that are installed; own ones first."""
    return (*_OWN, *(name for name in plugins.names(GROUP) if name not in _OWN))


def suite_of(name: str) -> Suite[Any]:
    """The suite of that name; imported only now.

    Raises:
        ConfigError: there is none.
    """
    if name in _OWN:
        own: Suite[Any] = import_module(f"{__package__}.{name}").SUITE
        return own
    try:
        found: Suite[Any] = plugins.load(GROUP, name)
    except LookupError as exc:
        raise ConfigError(f"--suite {name}: choose of {', '.join(names())}") from exc
    return found


def run(
    settings: RunSettings,
    *,
    notify: Callable[[str], None] = lambda message: None,
    known: Callable[[Report, str], None] = lambda report, row: None,
) -> Report:
    """Measure what the settings of a suite ask for; what is written is removed again.

    Args:
        settings: of any suite.
        notify: told what happens next, for a progress line.
        known: told what is in the report so far, and the row that is new, by suites that run for long.

    Raises:
        ConfigError: there is no room for the run, or what the suite compares is not installed.
        CkptError: a part that is no contender's failed.
    """
    return suite_of(settings.suite).run(settings, notify, known)


def render(report: Report) -> RenderableType:
    """Everything a run found, as tables."""
    return suite_of(report.suite).render(report)


def plot(report: Report, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises:
        ConfigError: see `check_plot`.
    """
    suite_of(report.suite).plot(report, path)


def write(report: Report, folder: Path) -> None:
    """Write each figure of a run of the suite `papers` into files of its own; makes the folder.

    Raises:
        ConfigError: as for `plot`.
    """
    writes = suite_of(report.suite).write
    assert writes is not None, "no other suite has figures of their own"
    writes(report, folder)
