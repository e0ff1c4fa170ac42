"""What a suite is: settings, a schedule, and figures that say how they are shown. The harness does the rest.

    settings -> schedule(run), with a crew -> report -> figures: tables, areas of a picture, JSON

To write one: a subclass of `RunSettings`, a worker whose public methods are the requests
(`ckpt_core.bench.serving`), a schedule that opens a `Crew` and notes what it is answered, and views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic

from rich.console import Group, RenderableType
from rich.text import Text

from ckpt_core.bench.machine import work_folder
from ckpt_core.bench.plot import draw
from ckpt_core.bench.results import Report
from ckpt_core.bench.run import Run, S
from ckpt_core.bench.settings import plain
from ckpt_core.bench.tables import contenders_table, machine_line, state_line
from ckpt_core.bench.views import View
from ckpt_core.system.machine import describe


def _nothing(settings: Any) -> dict[str, Any]:
    return {}


def _not_told(report: Report, row: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Suite(Generic[S]):
    """Ways and workloads that belong together.

    Attributes:
        settings: their class; its `suite` is the name.
        schedule: measures what the settings ask for, and fills the report. May raise ConfigError before
            anything is written.
        figures: what a report shows, in its order.
        about: the line of a report behind that of the machine.
        fields: what the report has among its settings besides their fields, or in their place.
        write: writes each figure into files of its own, where a suite has such.
    """

    settings: type[S]
    schedule: Callable[[Run[S]], None]
    figures: Callable[[Report], Iterable[View]]
    about: Callable[[Report], str] = state_line
    fields: Callable[[S], dict[str, Any]] = _nothing
    write: Callable[[Report, Path], None] | None = None

    @property
    def name(self) -> str:
        """As the command line and the report have it."""
        return self.settings.suite

    def run(
        self,
        settings: S,
        notify: Callable[[str], None],
        known: Callable[[Report, str], None] = _not_told,
    ) -> Report:
        """Measure; what is written is removed again. See `ckpt_core.bench.run`."""
        fields = {**plain(settings), **self.fields(settings)}
        report = Report(self.name, fields, describe(settings.root))
        with work_folder(settings.root) as folder:
            self.schedule(Run(settings, report, folder, notify, partial(known, report)))
        return report

    def render(self, report: Report) -> RenderableType:
        """Everything a run found: the machine, the tables of its figures, and who did not run."""
        parts: list[RenderableType] = [Text(f"{machine_line(report)}\n{self.about(report)}")]
        for view in self.figures(report):
            parts += view.tables(report)
        if report.entrants:
            parts.append(contenders_table(report))
        return Group(*parts)

    def plot(self, report: Report, path: Path) -> None:
        """Write the picture; see `ckpt_core.bench.plot`."""
        draw(report, path, [area for view in self.figures(report) for area in view.areas(report)])
