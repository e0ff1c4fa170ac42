"""All suites behind the same three verbs: run, render, plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ckpt_core.bench import deepspeed, horovod, lightning, papers, policy, ranks, rounds, tables
from ckpt_core.bench.deepspeed import DeepSpeedMeasure, DeepSpeedSettings
from ckpt_core.bench.horovod import HorovodMeasure, HorovodSettings
from ckpt_core.bench.lightning import LightningMeasure, LightningSettings
from ckpt_core.bench.papers import PapersMeasure, PapersSettings
from ckpt_core.bench.plot import draw, drawings
from ckpt_core.bench.policy import PolicyMeasure, PolicySettings
from ckpt_core.bench.ranks import RankMeasure, RankSettings
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import Measure, Settings, Suite

AnySettings = (
    Settings
    | RankSettings
    | LightningSettings
    | HorovodSettings
    | DeepSpeedSettings
    | PolicySettings
    | PapersSettings
)

_SETTINGS: dict[Suite, tuple[type[AnySettings], type[StrEnum]]] = {
    Suite.CORE: (Settings, Measure),
    Suite.RANKS: (RankSettings, RankMeasure),
    Suite.LIGHTNING: (LightningSettings, LightningMeasure),
    Suite.HOROVOD: (HorovodSettings, HorovodMeasure),
    Suite.DEEPSPEED: (DeepSpeedSettings, DeepSpeedMeasure),
    Suite.POLICY: (PolicySettings, PolicyMeasure),
    Suite.PAPERS: (PapersSettings, PapersMeasure),
}


@dataclass(frozen=True, slots=True)
class _View:
    """How the report of a suite is shown."""

    render: Callable[[Report], RenderableType]
    drawings: Callable[[Report], Sequence[Callable[[Any], None]]]


_VIEWS = {
    Suite.CORE: _View(tables.render, drawings),
    Suite.RANKS: _View(ranks.render, ranks.drawings),
    Suite.LIGHTNING: _View(lightning.render, lightning.drawings),
    Suite.HOROVOD: _View(horovod.render, horovod.drawings),
    Suite.DEEPSPEED: _View(deepspeed.render, deepspeed.drawings),
    Suite.POLICY: _View(policy.render, policy.drawings),
    Suite.PAPERS: _View(papers.render, papers.drawings),
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
    if isinstance(settings, HorovodSettings):
        return horovod.run(settings, notify=notify)
    if isinstance(settings, DeepSpeedSettings):
        return deepspeed.run(settings, notify=notify)
    if isinstance(settings, PolicySettings):
        return policy.run(settings, notify=notify)
    if isinstance(settings, PapersSettings):
        return papers.run(settings, notify=notify)
    return rounds.run(settings, notify=notify)


def render(report: Report) -> RenderableType:
    """Everything a run found, as tables."""
    return _VIEWS[Suite(report.suite)].render(report)


def plot(report: Report, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises:
        ConfigError: see `check_plot`.
    """
    draw(report, path, _VIEWS[Suite(report.suite)].drawings(report))


def write(report: Report, folder: Path) -> None:
    """Write each figure of a run of the suite `papers` into files of its own; makes the folder.

    Raises:
        ConfigError: as for `plot`.
    """
    assert report.suite == Suite.PAPERS, "no other suite has figures of their own"
    papers.write(report, folder)
