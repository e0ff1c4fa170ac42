"""All suites behind the same three verbs: run, render, plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from ckpt_core.bench import papers, policy, ranks, rounds, tables
from ckpt_core.bench.papers import PapersMeasure, PapersSettings
from ckpt_core.bench.plot import draw, drawings
from ckpt_core.bench.policy import PolicyMeasure, PolicySettings
from ckpt_core.bench.ranks import RankMeasure, RankSettings
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import Measure, Settings
from ckpt_core.errors import ConfigError
from ckpt_core.system import plugins

GROUP = "ckpt_core.bench"
"""Entry points of suites that measure an integration; each is a `Suite`."""


class AnySettings(Protocol):
    """Of any suite."""

    def quick(self) -> Any:
        """The same run with sizes that take seconds."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of contenders and workloads that belong together.

    Attributes:
        settings: makes the settings of a run.
        measures: what they can ask for one by one.
        run: measures; takes such settings, and `notify`.
        render: the tables of a report.
        drawings: the areas of its picture.
    """

    settings: Callable[..., AnySettings]
    measures: type[StrEnum]
    run: Callable[..., Report]
    render: Callable[[Report], RenderableType]
    drawings: Callable[[Report], Sequence[Callable[[Any], None]]]


_FIRST = {
    "core": Suite(Settings, Measure, rounds.run, tables.render, drawings),
    "ranks": Suite(RankSettings, RankMeasure, ranks.run, ranks.render, ranks.drawings),
}
_LAST = {
    "policy": Suite(PolicySettings, PolicyMeasure, policy.run, policy.render, policy.drawings),
    "papers": Suite(PapersSettings, PapersMeasure, papers.run, papers.render, papers.drawings),
}


def suite_names() -> list[str]:
    """Of all suites that are installed."""
    return [*_FIRST, *plugins.names(GROUP), *_LAST]


@cache
def suite_of(name: str) -> Suite:
    """The suite of a name.

    Raises:
        ConfigError: there is none.
    """
    own = _FIRST | _LAST
    if name in own:
        return own[name]
    try:
        found: Suite = plugins.load(GROUP, name)
    except LookupError as exc:
        raise ConfigError(f"--suite {name}: choose of {', '.join(suite_names())}") from exc
    return found


def run(settings: AnySettings, *, notify: Callable[[str], None] = lambda message: None) -> Report:
    """Measure what the settings of a suite ask for.

    Raises:
        ConfigError: there is no room for the run, or what the suite compares is not installed.
        CkptError: a part that is no contender's failed.
    """
    for suite in map(suite_of, suite_names()):
        if suite.settings is type(settings):
            return suite.run(settings, notify=notify)
    raise TypeError(f"no suite has settings of {type(settings)}")


def render(report: Report) -> RenderableType:
    """Everything a run found, as tables."""
    return suite_of(report.suite).render(report)


def plot(report: Report, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises:
        ConfigError: see `check_plot`.
    """
    draw(report, path, suite_of(report.suite).drawings(report))


def write(report: Report, folder: Path) -> None:
    """Write each figure of a run of the suite `papers` into files of its own; makes the folder.

    Raises:
        ConfigError: as for `plot`.
    """
    assert report.suite == "papers", "no other suite has figures of their own"
    papers.write(report, folder)
