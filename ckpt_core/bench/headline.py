"""What a reader sees first: four contenders, two measures, as one picture and one table of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.core import PERSIST, RESTORE_COLD, RESTORE_WARM, STALL_CALL
from ckpt_core.bench.plot import Bar, bars, color_of, finish, short
from ckpt_core.bench.results import Figure, Report, Stats
from ckpt_core.bench.tables import scaled, unit_name
from ckpt_core.errors import ConfigError
from ckpt_core.observe import check_plot
from ckpt_core.system.replacing import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = (OURS, "dcp_async_reused", "dcp_save", "torch_save_fsync")
_DISK = "raw_disk"
_DRAWN = (
    (STALL_CALL, "The call that saves holds training up for"),
    (PERSIST, "Saved and durable"),
)
_ROWS = (
    (PERSIST, "durable"),
    (STALL_CALL, "the call holds training up"),
    (RESTORE_COLD, "restore into live tensors from storage"),
    (RESTORE_WARM, "the same from the page cache"),
)


def draw_headline(report: Report, path: Path) -> None:
    """Write the picture: a bar for each of the four; the suffix of `path` chooses the format.

    Raises:
        ConfigError: the run is not of the suite core or lacks a figure; see also `check_plot`.
    """
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    _check(report)
    # The same figures give the same bytes, wherever they are drawn; text stays text.
    with rc_context(
        {"svg.hashsalt": "ckpt-core", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        canvas = Canvas(figsize=(9.6, 2.8), layout="constrained", facecolor="white")
        for area, (figure, title) in zip(canvas.subplots(1, 2), _DRAWN, strict=True):
            _bars(area, report, figure, title)
        canvas.supxlabel(_where(report), fontsize=7, color="#57606a")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with replaced(path) as file:
            canvas.savefig(file, dpi=160, metadata=metadata)


def _where(report: Report) -> str:
    machine, settings = report.machine, report.settings
    return (
        f"{settings['state_bytes'] / 1e6:,.0f} MB of state, median of {settings['rounds']} rounds (whiskers: "
        f"lowest, highest); {machine.cpus} CPUs, {machine.filesystem}, torch {machine.torch}, "
        f"{machine.date[:10]}"
    )


def _check(report: Report) -> None:
    missing = [figure.title for figure, _ in _DRAWN if OURS not in report.stats(figure)]
    if report.suite != "core" or missing:
        raise ConfigError(
            f"--headline needs a run of the suite core with --measure save; suite: {report.suite}"
        )


def _bars(area: Axes, report: Report, figure: Figure, title: str) -> None:
    found = {name: stats for name, stats in report.stats(figure).items() if name in NAMES}
    shown = []
    for name, stats in sorted(found.items(), key=lambda row: NAMES.index(row[0]), reverse=True):
        read = Stats(tuple(scaled(figure, value) for value in stats.values))
        text = f"{short(read.median)} {unit_name(figure)}"
        shown.append(Bar(report.title(name), read, text, color_of(report, name)))
    bars(area, shown, logarithmic=False)
    area.set_xlim(right=area.get_xlim()[1] * 1.12)
    better = "higher" if figure.higher_is_better else "lower"
    area.set_xlabel(f"{unit_name(figure)}, {better} is better", fontsize=9)
    finish(area, title)
    area.tick_params(axis="y", length=0)


def headline_table(report: Report) -> Iterator[str]:
    """The lines of the same figures as Markdown, with what the bare disk does."""
    names = [name for name in NAMES if name in report.stats(PERSIST)]
    yield f"| | {' | '.join(report.title(name) for name in names)} |"
    yield f"|{'---|' * (len(names) + 1)}"
    for figure, words in _ROWS:
        stats = report.stats(figure)
        if OURS in stats:
            cells = [_cell(figure, name, stats) for name in names]
            yield f"| {words}, {unit_name(figure)}{_disk(figure, stats)} | {' | '.join(cells)} |"


def _cell(figure: Figure, name: str, stats: dict[str, Stats]) -> str:
    text = short(scaled(figure, stats[name].median)) if name in stats else ""
    return f"**{text}**" if name == OURS else text


def _disk(figure: Figure, stats: dict[str, Stats]) -> str:
    if _DISK not in stats:
        return ""
    return f" (the bare disk: {short(scaled(figure, stats[_DISK].median))})"
