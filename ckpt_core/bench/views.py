"""How figures are shown, as data: each view is a table and, where that helps, an area of the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rich.console import RenderableType
from rich.table import Table

from ckpt_core.bench.plot import bars_of, dots, finish, log_ticks
from ckpt_core.bench.results import Figure, Make, Report, count
from ckpt_core.bench.tables import cell_table, ratio_table, spread_table, steady_table, unit_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Area = Callable[["Axes"], None]


class View(Protocol):
    """Something that a report shows; nothing where it has no values."""

    def tables(self, report: Report) -> Iterable[RenderableType]:
        """For a terminal."""

    def areas(self, report: Report) -> Iterable[Area]:
        """For the picture."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers that a family of figures lies over.

    Attributes:
        setting: field of the settings that has them.
        column: heading of one of them, with a place for the number; or a noun that is counted.
        label: of all, above the legend of the picture.
    """

    setting: str
    column: str
    label: str

    def numbers(self, report: Report) -> list[int]:
        """Of a run."""
        return list(report.settings[self.setting])

    def heading(self, number: int) -> str:
        """Of a column."""
        return self.column.format(number) if "{" in self.column else count(number, self.column)


INTERVALS = Axis("intervals", "every {}", "steps between saves")


@dataclass(frozen=True, slots=True)
class One:
    """One figure: a row for each way that has it.

    Attributes:
        columns: False: median, range and ratio in two columns, for suites of ways rather than of contenders.
        drawn: as bars.
        logarithmic: the axis of these.
    """

    figure: Figure
    columns: bool = True
    drawn: bool = False
    logarithmic: bool = False

    def tables(self, report: Report) -> Iterator[Table]:
        """Lowest, middle, highest value and ratio."""
        if report.stats(self.figure):
            yield (steady_table if self.columns else spread_table)(report, self.figure)

    def areas(self, report: Report) -> Iterator[Area]:
        """Bars, the best on top."""
        if self.drawn and report.stats(self.figure):
            yield bars_of(report, self.figure, self.logarithmic)


@dataclass(frozen=True, slots=True)
class Several:
    """Figures of one unit side by side: a column for each. `drawn` are those of which there are bars."""

    title: str
    columns: Sequence[tuple[str, Figure]]
    drawn: Sequence[Figure] = ()

    def tables(self, report: Report) -> Iterator[Table]:
        """A row for each way."""
        if any(report.stats(figure) for _, figure in self.columns):
            unit = unit_name(self.columns[0][1])
            yield ratio_table(report, f"{self.title}, {unit}", self.columns)

    def areas(self, report: Report) -> Iterator[Area]:
        """One for each figure."""
        for figure in self.drawn:
            if report.stats(figure):
                yield bars_of(report, figure, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A family of figures over the numbers of an axis: a column, and a point in the row of a way, for each.

    Attributes:
        title: of the table; with ratios the unit comes behind it.
        make: the figure at a number.
        axis: the numbers.
        ratios: to ours, in each cell.
        drawn: title in the picture; None: that of the table; empty: not drawn.
        mark: a dotted line at this value, as people read it.
    """

    title: str
    make: Make
    axis: Axis = INTERVALS
    ratios: bool = True
    drawn: str | None = None
    mark: float | None = None

    def _measured(self, report: Report) -> bool:
        return any(report.stats(self.make(at)) for at in self.axis.numbers(report))

    def tables(self, report: Report) -> Iterator[Table]:
        """A row for each way."""
        if not self._measured(report):
            return
        columns = [(self.axis.heading(at), self.make(at)) for at in self.axis.numbers(report)]
        if self.ratios:
            yield ratio_table(report, f"{self.title}, {unit_name(columns[0][1])}", columns)
        else:
            yield cell_table(report, self.title, columns)

    def areas(self, report: Report) -> Iterator[Area]:
        """A row for each way."""
        if self.drawn != "" and self._measured(report):
            yield partial(self._draw, report=report)

    def _draw(self, area: Axes, *, report: Report) -> None:
        numbers = self.axis.numbers(report)
        dots(area, report=report, make=self.make, numbers=numbers, title=self.axis.label)
        low = min(self._low(report, at) for at in numbers)
        if low > 0:
            area.set_xscale("log")
            log_ticks(area.xaxis)
        low, high = area.get_xlim()
        # Room for the value beside the last point.
        area.set_xlim(low, high * (high / low) ** 0.1 if low > 0 else high + (high - low) * 0.1)
        finish(area, self.title if self.drawn is None else self.drawn)
        if self.mark is not None:
            area.axvline(self.mark, color="#333333", linewidth=0.8, linestyle=":")

    def _low(self, report: Report, at: int) -> float:
        return min((stats.median for stats in report.stats(self.make(at)).values()), default=1.0)


def _none(report: Report) -> Iterable[Area]:
    return ()


@dataclass(frozen=True, slots=True)
class Own:
    """What only one suite shows."""

    tables: Callable[[Report], Iterable[RenderableType]]
    areas: Callable[[Report], Iterable[Area]] = _none
