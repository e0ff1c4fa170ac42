"""What `simulate` found, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.text import table
from ckpt_core.simulate import Comparison, Kind, Point, Strategy, Study
from ckpt_core.units import count_text, every_text, size_text, time_text

if TYPE_CHECKING:
    from rich.table import Table


def useful(point: Point, study: Study) -> float:
    """Part of the run that went into iterations that count, at their time without checkpoints."""
    return point.goodput * study.setting.job.iteration_s


def point_row(point: Point, study: Study) -> dict[str, Any]:
    """A point with plain values."""
    return {
        **asdict(point),
        "strategy": point.strategy.value,
        "useful": useful(point, study),
    }


def study_text(study: Study) -> str:
    """What was run, in a line or two."""
    job, rates = study.setting.job, study.setting.rates
    parts = [
        f"{time_text(job.iteration_s)} an iteration, {size_text(int(job.state_bytes))} of state",
        f"write {_rate(rates.write)}, one thread {_rate(rates.serial)}, copy {_rate(rates.copy)}, "
        f"read {_rate(rates.read)}, network {_rate(rates.network)}",
    ]
    if study.trace is not None:
        changes = study.trace.changes
        losses = sum(change < 0 for change in changes)
        parts.append(
            f"trace of {time_text(study.trace.duration_s)}: {count_text(len(changes), 'change')}, "
            f"{losses} of them losses"
        )
    elif study.mtbfs_s:
        parts.append(f"means of {count_text(study.runs, 'run')}")
    if study.levels != ((),):
        parts.append(_levels_text(study))
    return "\n".join(parts)


def in_words(points: Sequence[Point], study: Study) -> list[str]:
    """What follows, for each failure rate: how often to save, what that costs, and what a failure costs."""
    return [text for mtbf_s in study.mtbfs_s or (None,) for text in _advice(points, study, mtbf_s)]


def _advice(points: Sequence[Point], study: Study, mtbf_s: float | None) -> list[str]:
    at_rate = [point for point in points if point.mtbf_s == mtbf_s]
    best = {
        strategy: max(mine, key=lambda point: point.goodput)
        for strategy in study.strategies
        if strategy is not Strategy.IDEAL
        and (mine := [point for point in at_rate if point.strategy is strategy])
    }
    if not best:
        return []
    ours = best.get(Strategy.OURS) or max(best.values(), key=lambda point: point.goodput)
    lines = [
        f"With {ours.strategy.label}, save {every_text(ours.interval)}: that costs "
        f"{1 - 1 / ours.slowdown:.1%} of the time{_failure_text(ours, study)}."
    ]
    if ours.failures:
        rivals = [
            f"{p.strategy.label} {useful(p, study):.1%}{_beyond(p, at_rate)}"
            for p in best.values()
            if p is not ours
        ]
        others = "; the others at the best of these intervals: "
        beside = others + ", ".join(rivals) if rivals else ""
        each = "" if mtbf_s is None else f" at a failure every {time_text(mtbf_s)}"
        beyond = _beyond(ours, at_rate)
        lines.append(f"So {useful(ours, study):.1%} of the run counts{each}{beyond}{beside}.")
    return lines


def _failure_text(point: Point, study: Study) -> str:
    """What a failure costs: at most, or where levels can be lost what the worst one did."""
    if point.most_s is not None:
        return f", and a failure at most {time_text(point.most_s)} besides the restart"
    if point.worst_recovery_s is None:
        return ""
    failures = count_text(round(point.failures * (study.runs if study.mtbfs_s else 1)), "failure")
    text = (
        f", and the worst of {failures} took {time_text(point.worst_recovery_s)} to load and train again, "
        "besides the restart and saves"
    )
    kinds = [kind for kind in Kind if study.kinds.get(kind)] or [Kind.NODE]
    most = max(kind.rank for kind in (study.survives, *[one.survives for one in study.levels[0]]))
    fatal = [f"a {kind}" for kind in kinds if kind.rank > most]
    return f"{text}; after the loss of {' or '.join(fatal)} it begins anew" if fatal else text


def _beyond(best: Point, points: Sequence[Point]) -> str:
    """Whether the best interval of a strategy is at an end of those that were tried."""
    tried = [point.interval for point in points if point.strategy is best.strategy]
    if best.interval == max(tried):
        return " (longer may be better)"
    return " (shorter may be better)" if best.interval == min(tried) > 1 else ""


def _levels_text(study: Study) -> str:
    parts = [f"the first root survives the loss of a {study.survives}"]
    for number, level in enumerate(study.levels[0], start=1):
        kept = level.redundancy
        parts.append(
            f"level {number}: {time_text(level.copy_s)} to it, {time_text(level.restore_s)} back, "
            f"survives the loss of a {level.survives}"
        )
        if kept is not None:
            parts[-1] += f"; {kept}, made good {time_text(kept.refill_s)} after a loss"
    return "\n".join(parts)


def _rate(rate: float) -> str:
    return "endless" if rate == float("inf") else f"{size_text(int(rate))}/s"


def points_table(points: Sequence[Point], study: Study) -> Table:
    """A row for each point; the best interval of a strategy is marked."""
    total = study.goal.iterations is not None
    headings = ["strategy", "mtbf"] if study.mtbfs_s else ["strategy"]
    further = [f"level {number}" for number in range(1, len(study.levels[0]) + 1)]
    numbers = [
        "interval",
        *further,
        "slowdown",
        "total" if total else "goodput, 1/s",
        "useful",
        "failures",
    ]
    numbers += ["redone", "recovery", "worst", "bound", "Young"]
    if not study.mtbfs_s:
        numbers.remove("Young")
    if study.survives is not Kind.SITE:
        numbers.remove("bound")
    rows = [_cells(point, points, study, total=total) for point in points]
    return table([*headings, *numbers, ""], rows, right=numbers)


def _cells(point: Point, points: Sequence[Point], study: Study, *, total: bool) -> list[str]:
    cells = [point.strategy.value]
    if study.mtbfs_s:
        cells.append(time_text(point.mtbf_s))
    cells += [
        str(point.interval),
        *map(str, point.every),
        f"{point.slowdown:.3f}",
        time_text(point.wall_s) if total else f"{point.goodput:.4g}",
        f"{useful(point, study):.1%}",
        f"{point.failures:,.0f}",
        f"{point.redone:,.0f}",
        time_text(point.mean_recovery_s),
        time_text(point.worst_recovery_s),
    ]
    if study.survives is Kind.SITE:
        cells.append(time_text(point.bound_s))
    if study.mtbfs_s:
        cells.append("" if point.young_interval is None else str(point.young_interval))
    rivals = [
        other
        for other in points
        if (other.strategy, other.mtbf_s) == (point.strategy, point.mtbf_s)
    ]
    best = max(rivals, key=lambda other: other.goodput)
    cells.append("best" if best is point and len(rivals) > 1 else "")
    return cells


def schedule_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Average completion time, and what a switch costs."""
    cells = [
        [
            str(row["strategy"]),
            time_text(row["save_s"]),
            time_text(row["load_s"]),
            time_text(row["mean_completion_s"]),
        ]
        for row in rows
    ]
    numbers = ["save", "load", "average completion"]
    return table(["strategy", *numbers], cells, right=numbers)


def paper_table(rows: Sequence[Comparison]) -> Table:
    """The paper's values beside ours."""
    cells = [
        [
            row.what,
            "" if row.paper is None else f"{row.paper:.4g}",
            f"{row.ours:.4g}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            row.source,
            row.note,
        ]
        for row in rows
    ]
    numbers = ["paper", "ours", "ratio"]
    return table(["", *numbers, "source", "note"], cells, right=numbers)
