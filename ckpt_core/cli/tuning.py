"""`ckpt-core tune`: which settings, and how often. Everything happens in `ckpt_core.tune`."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core import tune as tuner
from ckpt_core.cli.exported import check_outside
from ckpt_core.cli.meanwhile import meanwhile
from ckpt_core.cli.text import console, note, say, say_json, say_rich, table
from ckpt_core.errors import ConfigError
from ckpt_core.observe import check_plot
from ckpt_core.policy import tuning
from ckpt_core.units import count_text, every_text, parse_bytes, size_text, time_text

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_core.cli.tune_request import TuneRequest

_ROWS = 20


def run_tuner(request: TuneRequest) -> bool:
    """Search, and say what to use; False when a limit cannot be met."""
    if request.plot is not None:
        if not request.plot.absolute().parent.is_dir():
            raise ConfigError(f"{str(request.plot)!r} cannot be written: no such directory")
        check_plot(request.plot)
        check_outside(Path(os.path.realpath(request.plot)))
    settings = _settings(request)
    if settings.max_overhead > 1:
        bound = settings.max_overhead
        note(f"max_overhead={bound:g} lets saves cost {bound:.0%} of training: 0.05 is 5%")
    with meanwhile(console(stderr=True), shown=not request.no_progress) as notify:
        report = tuner.tune(settings, notify=notify)
    if request.plot is not None:
        tuner.draw_tuning(report, request.plot)
    if request.json:
        say_json(tuner.as_json(report))
    else:
        _say(report)
    for problem in report.problems:
        note(f"not met: {problem}")
    return not report.problems


def _settings(request: TuneRequest) -> tuner.TuneSettings:
    try:
        stand_in = tuner.StandIn(request.load)
    except ValueError as exc:
        raise ConfigError(f"--load {request.load}: choose of {', '.join(tuner.StandIn)}") from exc
    return tuner.TuneSettings(
        root=request.root or Path.cwd(),
        model_bytes=_size(request.model_bytes, "model_bytes"),
        iteration_s=request.iteration_s,
        command=tuple(request.command or ()),
        stand_in=stand_in,
        device=request.device,
        max_memory_bytes=_size(request.max_memory, "max_memory"),
        max_storage_bytes=_size(request.max_storage, "max_storage"),
        max_overhead=request.max_overhead,
        max_interval=request.max_interval,
        keep_last=request.keep_last,
        axes=_axes(request),
        saves=request.saves,
        rounds=request.rounds,
        checks=request.checks,
        minutes=request.minutes,
        exhaustive=request.exhaustive,
        seed=request.seed,
        timeout_s=request.timeout_s,
    )


def _axes(request: TuneRequest) -> tuning.Axes:
    def sizes(texts: list[str] | None, name: str) -> tuple[int, ...]:
        return tuple(parse_bytes(text, field=name) for text in texts or ())

    return tuning.Axes(
        tuple(request.in_flight or ()),
        tuple(request.writers or ()),
        sizes(request.chunk_bytes, "chunk_bytes"),
        sizes(request.staging_bytes, "staging_bytes"),
        tuple(request.direct_io or ()),
    )


def _size(text: str | None, field: str) -> int | None:
    return None if text is None else parse_bytes(text, field=field)


def _say(report: tuner.TuneReport) -> None:
    """In words first; then the table, the recommendation, the interval, and how sure all that is."""
    best = report.found.best
    say(_in_words(report))
    say("")
    say_rich(_table(report))
    left = len(report.found.samples) - _ROWS
    if left > 0:
        say(f"and {left} more; --json has them")
    say("")
    say(_searched(report))
    say(_sure(report))
    say("")
    say(tuning.as_options(best))
    for line in tuning.as_environment(best):
        say(line)
    say("")
    for line in _interval(report):
        say(line)
    for text in report.notes:
        say(f"note: {text}")


def _in_words(report: tuner.TuneReport) -> str:
    """What to do, what it costs, and what a crash would lose."""
    every, load, best = report.every, report.load, report.found.best
    tried = [checked.overhead for checked in report.checks if checked.every == every]
    cost = tried[-1] if tried else load.overhead_at(every)
    lost_s = tuning.most_lost_s(
        report.timings[best], between_s=every * load.iteration_s, in_flight=best.in_flight
    )
    return (
        f"Save {every_text(every)} with the settings below: that costs {max(cost, 0):.1%} of training "
        f"({'tried out' if tried else 'computed'}), and a crash loses at most {time_text(lost_s)} of it."
    )


def _table(report: tuner.TuneReport) -> Table:
    headings = (
        "in flight",
        "writers",
        "chunk",
        "staging",
        "direct",
        "Tw",
        "Tw / N",
        "turns",
        "finals",
        "spread",
        "",
    )
    rows = [_row(report, candidate) for candidate in report.ranked()[:_ROWS]]
    return table(headings, rows, right=headings[:-1])


def _row(report: tuner.TuneReport, candidate: tuning.Candidate) -> tuple[str, ...]:
    found = report.found
    values, finals = found.samples[candidate], found.finals.get(candidate)
    shown = finals or values
    marks = {"recommended": found.best, "defaults": found.start}
    return (
        str(candidate.in_flight),
        str(candidate.writers),
        size_text(candidate.chunk_bytes),
        size_text(candidate.staging_bytes),
        candidate.direct_io,
        _seconds(report.write_s(candidate)),
        _seconds(statistics.median(values)),
        str(len(values)),
        _seconds(statistics.median(finals)) if finals else "",
        f"{(max(shown) - min(shown)) / statistics.median(shown):.0%}" if len(shown) > 1 else "",
        ", ".join(mark for mark, marked in marks.items() if marked == candidate),
    )


def _searched(report: tuner.TuneReport) -> str:
    found = report.found
    how = "all measured" if report.exhaustive else f"{len(found.samples)} of them measured"
    return (
        f"{report.candidates} candidates, {how}, {found.turns} turns in {report.seconds:.0f} s; "
        f"Tw / N is the time that storage takes for each checkpoint of "
        f"{report.limits.step_bytes / 1e6:.0f} MB"
    )


def _sure(report: tuner.TuneReport) -> str:
    """How sure the choice is."""
    sure = report.sureness
    text = (
        f"recommended: {_seconds(sure.median_s)} for each checkpoint "
        f"({_seconds(sure.least_s)} to {_seconds(sure.most_s)}), {sure.gain:.2f} x the speed of the defaults"
    )
    if sure.rival is None:
        return f"{text}; nothing else to compare with"
    beside = f"faster than the next one in {sure.wins} of {sure.rounds} rounds"
    if sure.clear and sure.ahead > 0:
        return f"{text}; {beside}, by {sure.ahead:.0%}"
    return f"{text}; the next one is as fast, as far as can be told ({beside})"


def _interval(report: tuner.TuneReport) -> list[str]:
    load = report.load
    lines = [
        f"smallest interval: {count_text(report.every, 'step')} of {_seconds(load.iteration_s)}, "
        f"for at most {report.max_overhead:.1%} slowdown; "
        f"f* = ceil(Tw / (N q t)) = {report.storage_every}"
    ]
    for checked in report.checks:
        rounds = ", ".join(f"{overhead:.1%}" for overhead in checked.overheads)
        lines.append(
            f"interval {checked.every}, tried out: {checked.overhead:.1%} slowdown ({rounds})"
        )
    storage = report.limits.storage_of(report.found.best.in_flight)
    lines.append(
        f"takes up to {size_text(report.found.best.staging_bytes)} of memory on each rank and "
        f"{size_text(storage)} of storage, with {report.limits.keep_last} steps kept"
    )
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
