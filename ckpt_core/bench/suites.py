"""All suites behind the same three verbs: run, render, plot."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from rich.console import RenderableType

from ckpt_core.bench import lightning, ranks, rounds, tables
from ckpt_core.bench.lightning import LightningMeasure, LightningSettings
from ckpt_core.bench.plot import draw, drawings
from ckpt_core.bench.ranks import RankMeasure, RankSettings
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import Measure, Settings, Suite

AnySettings = Settings | RankSettings | LightningSettings

_SETTINGS: dict[Suite, tuple[type[AnySettings], type[StrEnum]]] = {
    Suite.CORE: (Settings, Measure),
    Suite.RANKS: (RankSettings, RankMeasure),
    Suite.LIGHTNING: (LightningSettings, LightningMeasure),
}


def settings_of(suite: Suite) -> tuple[Callable[..., AnySettings], type[StrEnum]]:
    """What makes the settings of a suite, and which measures they know."""
    return _SETTINGS[suite]


def run(settings: AnySettings, *, notify: Callable[[str], None] = lambda message: None) -> Report:
    """Measure what the settings of a suite ask for.

    Raises:
        ConfigError: there is no room for the run, or what the suite compares is not installed.
        CkptError: a part that is no contender's failed.
    """
    if isinstance(settings, RankSettings):
        return ranks.run(settings, notify=notify)
    if isinstance(settings, LightningSettings):
        return lightning.run(settings, notify=notify)
    return rounds.run(settings, notify=notify)


def render(report: Report) -> RenderableType:
    """Everything a run found, as tables."""
    if report.suite == Suite.RANKS:
        return ranks.render(report)
    if report.suite == Suite.LIGHTNING:
        return lightning.render(report)
    return tables.render(report)


def plot(report: Report, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises:
        ConfigError: see `check_plot`.
    """
    areas = {Suite.RANKS.value: ranks.drawings, Suite.LIGHTNING.value: lightning.drawings}
    draw(report, path, areas.get(report.suite, drawings)(report))
