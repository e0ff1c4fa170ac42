"""What a report of the suite `policy` shows: CheckFreq's figure, intervals over time, and each reaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from ckpt_core.bench.plot import finish
from ckpt_core.bench.policy import conditions as figures
from ckpt_core.bench.policy.conditions import ADAPTIVE, ALONE, FIXED
from ckpt_core.bench.policy.reaction import SETTLE_WITHIN, iterations_until
from ckpt_core.bench.results import Report
from ckpt_core.bench.tables import cell, text_table
from ckpt_core.bench.views import Own

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PERCENTS = (
    "overhead of all of them, %",
    "what saves add to them, %",
    f"from {SETTLE_WITHIN} on, by its saves, %",
)
_COLUMNS = (
    ("overhead, %", figures.OVERHEAD),
    ("Auto says, %", figures.TOLD),
    ("interval, steps", figures.INTERVAL),
    ("a save adds, ms", figures.COST),
    ("iteration without saves, ms", figures.ITERATION),
)
_COLORS = {ALONE: "#7c8aa0", FIXED: "#333333", ADAPTIVE: "#c2410c"}
_DISTURBED = ("change", "before", "saving", "drain", "after")


def job_line(report: Report) -> str:
    """What trains, and what is beside it."""
    settings = report.settings
    load = settings["load"]
    return (
        f"state {settings['state_bytes'] / 1e6:.0f} MB in {settings['leaves']} leaves, training on "
        f"{settings['threads']} thread(s), {settings['rounds']} rounds; the second job: "
        f"{load['cpu_threads']} thread(s) computing, {load['disk_threads']} writing"
    )


def _tables(report: Report) -> Iterator[RenderableType]:
    found = report.more["policy"]
    if report.values:
        yield _conditions(report, found["conditions"])
    for row in found["conditions"].values():
        if row["changes"]:
            yield _changes(report, row["changes"])
    if found["decision"] is not None:
        yield _decision(found["decision"])


def _conditions(report: Report, found: dict[str, Any]) -> RenderableType:
    """CheckFreq's three bars."""
    bound = report.settings["max_overhead"]
    overheads = report.stats(figures.OVERHEAD)
    rows = []
    for name, row in found.items():
        if name in overheads:
            holds = "holds" if overheads[name].median <= bound else "BROKEN"
            cells = [cell(report, figure, name) for _, figure in _COLUMNS]
            rows.append([report.title(name), holds, *cells, _saves(row["rounds"])])
    title = f"Overhead with a bound of {bound:.1%}: median (min-max)"
    heads = ["condition", "bound", *[heading for heading, _ in _COLUMNS], "saves, in iterations"]
    return text_table(title, heads, rows, left=heads[:2])


def _saves(rounds: list[dict[str, Any]]) -> str:
    saves = sum(len(row["intervals"]) for row in rounds)
    return f"{saves} in {sum(row['iterations'] for row in rounds)}"


def _changes(report: Report, changes: list[dict[str, Any]]) -> RenderableType:
    """What Auto did when the second job began."""
    bound = report.settings["max_overhead"]
    title = f"The second job begins: iterations until the following ones are within {bound:.1%}"
    heads = ("round", "iterations", "by what saves add", "by their number", "of", *_PERCENTS)
    rows = []
    for number, change in enumerate(changes, 1):
        count = len(change["overheads"])
        after = f"not in {count}" if change["after"] is None else str(change["after"])
        intervals = " ".join(str(steps) for _, steps in change["intervals"])
        added = change["added"]
        by_saves = None if added is None else iterations_until(bound, added)
        parts = (change["overheads"][0], None if added is None else added[0], change["settled"])
        percents = ["" if part is None else f"{part * 100:.1f}" for part in parts]
        told = f"not in {count}" if by_saves is None else str(by_saves)
        by_number = "" if change["counted"] is None else str(change["counted"])
        rows.append([str(number), after, told, by_number, str(count), *percents, intervals])
    return text_table(title, (*heads, "intervals"), rows)


def _decision(found: dict[str, Any]) -> Text:
    median_us, mean_us = found["median_s"] * 1e6, found["mean_s"] * 1e6
    return Text(
        f"A decision of Auto: {median_us:.2f} us, median of {found['questions']} (mean {mean_us:.2f} us)"
    )


def _areas(report: Report) -> Iterator[Callable[[Axes], None]]:
    conditions = report.more["policy"]["conditions"]
    if report.stats(figures.OVERHEAD):
        yield partial(_overheads, report=report)
        yield partial(_intervals, report=report, conditions=conditions)
    if ADAPTIVE in conditions and conditions[ADAPTIVE]["changes"]:
        yield partial(_reactions, report=report)
        yield partial(_iterations, trace=conditions[ADAPTIVE]["trace"])


def _overheads(area: Axes, *, report: Report) -> None:
    """A bar for each condition, and the bound as a dotted line."""
    for number, (name, stats) in enumerate(report.stats(figures.OVERHEAD).items()):
        middle = stats.median * 100
        whiskers = [[middle - stats.min * 100], [stats.max * 100 - middle]]
        area.bar(
            report.title(name), middle, yerr=whiskers, color=_COLORS[name], width=0.6, capsize=4
        )
        area.annotate(
            f"{middle:.1f}", (number, stats.max * 100), xytext=(0, 4), textcoords="offset points",
            ha="center", fontsize=9,
        )  # fmt: skip
    _bound(area, report)
    area.set_ylabel("% of an iteration, lower is better", fontsize=9)
    finish(area, "Overhead over iterations without saves")


def _bound(area: Axes, report: Report) -> None:
    area.axhline(report.settings["max_overhead"] * 100, color="#333333", linewidth=1, linestyle=":")


def _intervals(area: Axes, *, report: Report, conditions: dict[str, Any]) -> None:
    """A line for each condition; where the second job is on in the last one, the area is shaded."""
    for name, found in conditions.items():
        steps, intervals = _over_time(found["trace"])
        if steps:
            area.step(steps, intervals, where="post", label=report.title(name), color=_COLORS[name])
    if ADAPTIVE in conditions:
        for first, last in _disturbed(conditions[ADAPTIVE]["trace"]):
            area.axvspan(first, last, color=_COLORS[ADAPTIVE], alpha=0.12, linewidth=0)
    area.set_xlabel("iteration; shaded: the second job is on, for Auto beside it", fontsize=9)
    area.set_ylabel("steps between saves", fontsize=9)
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
    area.set_ylabel("ms an iteration", fontsize=9)
    finish(area, "Iterations of Auto beside a job")


FIGURES = (Own(_tables, _areas),)
