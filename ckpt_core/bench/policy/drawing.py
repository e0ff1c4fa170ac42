"""What a picture of the suite `policy` shows: bars of CheckFreq's figure, and intervals over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.plot import finish
from ckpt_core.bench.policy import figures
from ckpt_core.bench.policy.conditions import ADAPTIVE, ALONE, FIXED
from ckpt_core.bench.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {ALONE: "#7c8aa0", FIXED: "#333333", ADAPTIVE: "#c2410c"}
_DISTURBED = ("change", "before", "saving", "drain", "after")


def drawings(report: Report) -> list[Callable[[Axes], None]]:
    """Which areas there is something to draw for."""
    areas: list[Callable[[Axes], None]] = []
    conditions = report.more["policy"]["conditions"]
    if report.stats(figures.OVERHEAD):
        areas.append(partial(_overheads, report=report))
        areas.append(partial(_intervals, conditions=conditions))
    if ADAPTIVE in conditions and conditions[ADAPTIVE]["changes"]:
        areas.append(partial(_reactions, report=report))
        areas.append(partial(_iterations, trace=conditions[ADAPTIVE]["trace"]))
    return areas


def _overheads(area: Axes, *, report: Report) -> None:
    """A bar for each condition, and the bound as a dotted line."""
    for number, (name, stats) in enumerate(report.stats(figures.OVERHEAD).items()):
        middle = stats.median * 100
        whiskers = [[middle - stats.min * 100], [stats.max * 100 - middle]]
        area.bar(name, middle, yerr=whiskers, color=_COLORS[name], width=0.6, capsize=4)
        area.annotate(
            f"{middle:.1f}", (number, stats.max * 100), xytext=(0, 4), textcoords="offset points",
            ha="center", fontsize=9,
        )  # fmt: skip
    _bound(area, report)
    area.set_ylabel("%, lower is better", fontsize=9)
    finish(area, "Overhead over iterations without saves")


def _bound(area: Axes, report: Report) -> None:
    area.axhline(report.settings["max_overhead"] * 100, color="#333333", linewidth=1, linestyle=":")


def _intervals(area: Axes, *, conditions: dict[str, Any]) -> None:
    """A line for each condition; where the second job is on in the last one, the area is shaded."""
    for name, found in conditions.items():
        steps, intervals = _over_time(found["trace"])
        if steps:
            area.step(steps, intervals, where="post", label=name, color=_COLORS[name])
    if ADAPTIVE in conditions:
        for first, last in _disturbed(conditions[ADAPTIVE]["trace"]):
            area.axvspan(first, last, color=_COLORS[ADAPTIVE], alpha=0.12, linewidth=0)
    area.set_xlabel("iteration; shaded: the second job is on, for auto_beside_job", fontsize=9)
    area.set_ylabel("steps", fontsize=9)
    area.set_yscale("log")
    area.yaxis.set_major_formatter("{x:g}")
    area.legend(fontsize=8, frameon=False)
    finish(area, "Interval")


def _over_time(trace: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    steps: list[int] = []
    intervals: list[int] = []
    for block in trace:
        for offset, interval in block["intervals"]:
            steps.append(block["first"] + offset)
            intervals.append(interval)
    if steps:
        last = trace[-1]
        steps.append(last["first"] + len(last["seconds"]))
        intervals.append(intervals[-1])
    return steps, intervals


def _disturbed(trace: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """From where to where the second job was on, in steps."""
    first: int | None = None
    for block in trace:
        if block["part"] == "change":
            first = block["first"]
        if block["part"] == "after" and first is not None:
            yield first, block["first"] + len(block["seconds"])
            first = None


def _reactions(area: Axes, *, report: Report) -> None:
    """What lies right of a point is within the bound where the line is below it."""
    for number, change in enumerate(report.more["policy"]["conditions"][ADAPTIVE]["changes"], 1):
        # The last iterations are too few to say anything.
        overheads = change["overheads"][: max(1, len(change["overheads"]) // 2)]
        percent = [overhead * 100 for overhead in overheads]
        area.plot(percent, color=_COLORS[ADAPTIVE], alpha=0.35 + 0.1 * (number % 5), linewidth=1)
    _bound(area, report)
    area.set_xlabel("iterations since the second job began", fontsize=9)
    area.set_ylabel("% overhead of all iterations that follow", fontsize=9)
    finish(area, "How long a change breaks the bound (a line for each round)")


def _iterations(area: Axes, *, trace: list[dict[str, Any]]) -> None:
    """Every iteration of the adaptive run, and where it has saved."""
    for block in trace:
        steps = range(block["first"], block["first"] + len(block["seconds"]))
        milliseconds = [seconds * 1e3 for seconds in block["seconds"]]
        quiet = block["part"] not in _DISTURBED
        color = _COLORS[ALONE] if quiet else _COLORS[ADAPTIVE]
        area.plot(steps, milliseconds, ".", markersize=2.5, color=color)
        for save in block["saves"]:
            area.axvline(block["first"] + save, color="#333333", linewidth=0.4, alpha=0.4)
    area.set_xlabel("iteration; grey lines: saves; red: the second job is on", fontsize=9)
    area.set_ylabel("ms", fontsize=9)
    finish(area, f"Iterations of {ADAPTIVE}")
