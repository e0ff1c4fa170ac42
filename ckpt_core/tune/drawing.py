"""A run of the tuner as one picture: what PCcheck shows in its figures 12 to 14. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.observe import check_plot
from ckpt_core.policy import tuning
from ckpt_core.system.replacing import replaced
from ckpt_core.tune.report import TuneReport
from ckpt_core.units import every_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEST, _OTHER, _FAINT = "#c2410c", "#7c8aa0", "#c9ced6"
_LINES = {"auto": (_OTHER, "-"), "on": ("#3f7d58", ":"), "off": ("#7a4fa3", "--")}
"""Color and style of the line of each `direct_io`."""

_TITLES = {
    "in_flight": "Checkpoints in flight (N)",
    "writers": "Writers (p)",
    "chunk_bytes": "Size of a chunk",
    "staging_bytes": "Staging memory",
}


def draw_tuning(report: TuneReport, path: Path) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the suffix.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(15, 9), layout="constrained")
    areas = canvas.subplots(2, 3).flatten()
    # No panel for direct_io: it is a line of its own in each of the others.
    for area, axis in zip(areas, _TITLES, strict=False):
        _axis(area, report, axis)
    _finals(areas[4], report)
    _intervals(areas[5], report)
    machine = report.machine
    canvas.suptitle(
        f"{tuning.as_options(report.found.best)}, {every_text(report.every)}\n"
        f"{report.limits.rank_bytes / 1e6:.0f} MB for each rank, {machine.cpus} CPUs, "
        f"{machine.filesystem} on {machine.disk}",
        fontsize=11,
    )
    with replaced(path) as file:
        canvas.savefig(file, dpi=120)


def _axis(area: Axes, report: TuneReport, axis: str) -> None:
    """Each candidate as a dot over its value; a line through the best of each value and `direct_io`."""
    medians = {c: statistics.median(values) for c, values in report.found.samples.items()}
    values = sorted({getattr(candidate, axis) for candidate in medians})
    places = [values.index(getattr(candidate, axis)) for candidate in medians]
    area.scatter(places, list(medians.values()), s=14, color=_FAINT, label="candidates")
    tried = _tried(report)
    for direct_io in tried:
        lowest: dict[int, float] = {}
        for candidate, median in medians.items():
            if candidate.direct_io == direct_io:
                place = values.index(getattr(candidate, axis))
                lowest[place] = min(median, lowest.get(place, median))
        color, style = _LINES[direct_io]
        label = "best at each value" if len(tried) == 1 else f'best with direct_io="{direct_io}"'
        ends = sorted(lowest.items())
        area.plot(*zip(*ends, strict=True), marker="o", color=color, linestyle=style, label=label)
    best = report.found.best
    area.scatter(
        [values.index(getattr(best, axis))],
        [medians[best]],
        s=90,
        marker="*",
        color=_BEST,
        zorder=4,
        label="recommended",
    )
    area.set_xticks(range(len(values)), [_value(axis, value) for value in values])
    area.set_ylim(bottom=0)
    area.set_ylabel("seconds for each checkpoint", fontsize=9)
    area.legend(fontsize=8, frameon=False)
    _finish(area, _TITLES[axis])


def _tried(report: TuneReport) -> list[str]:
    """Each `direct_io` that had a turn."""
    return sorted({candidate.direct_io for candidate in report.found.samples})


def _value(axis: str, value: int) -> str:
    return _mib(value) if axis.endswith("_bytes") else str(value)


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"


def _finals(area: Axes, report: TuneReport) -> None:
    """The finalists, one dot for each round."""
    ranked: Sequence[tuning.Candidate] = [c for c in report.ranked() if c in report.found.finals]
    for place, candidate in enumerate(ranked):
        turns = report.found.finals[candidate]
        color = _BEST if candidate == report.found.best else _OTHER
        area.scatter(turns, [place] * len(turns), s=18, color=color)
        area.scatter([statistics.median(turns)], [place], s=160, marker="|", color=color)
    several = len(_tried(report)) > 1
    names = [
        f"N={c.in_flight} p={c.writers} {c.direct_io if several else ''}\n"
        f"{_mib(c.chunk_bytes)} of {_mib(c.staging_bytes)}"
        for c in ranked
    ]
    area.set_yticks(range(len(ranked)), names)
    area.invert_yaxis()
    area.set_xlabel("seconds for each checkpoint; bar: median", fontsize=9)
    _finish(area, "Finals, side by side")


def _intervals(area: Axes, report: TuneReport) -> None:
    """What is expected to be lost at each interval, and what was."""
    most = max(4 * report.every, 8)
    every = range(1, most + 1)
    expected = [100 * report.load.overhead_at(steps) for steps in every]
    area.plot(every, expected, color=_OTHER, label="storage alone: Tw / (N k t) - 1")
    for checked in report.checks:
        values = [100 * overhead for overhead in checked.overheads]
        area.scatter([checked.every] * len(values), values, s=16, color=_BEST)
    if report.checks:
        area.scatter([], [], s=16, color=_BEST, label="measured, one dot for each round")
    bound = 100 * report.max_overhead
    area.axhline(bound, color="#333333", linewidth=0.8, linestyle=":", label="bound")
    area.axvline(report.every, color=_BEST, linewidth=0.8, linestyle=":")
    highest = max([4 * bound, *(150 * c.overhead for c in report.checks)])
    area.set_ylim(min(0.0, *(100 * min(c.overheads) for c in report.checks), 0.0), highest)
    area.set_xlabel("steps between saves (k)", fontsize=9)
    area.set_ylabel("slowdown in %", fontsize=9)
    area.legend(fontsize=8, frameon=False)
    _finish(area, "Slowdown over no saves")


def _finish(area: Axes, title: str) -> None:
    """Title and no frame."""
    area.set_title(title, fontsize=10)
    area.tick_params(labelsize=8)
    area.spines[["top", "right"]].set_visible(False)
