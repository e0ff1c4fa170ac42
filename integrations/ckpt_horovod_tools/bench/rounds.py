"""The order of a run of the suite `horovod`, and what is noted of each window.

In a round, every way trains through the same window of iterations, the two without saves among them, in
random order and one after the other: what a window is compared with was measured within the same minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ckpt_core.bench import results
from ckpt_core.bench.machine import check_room, describe, work_folder
from ckpt_core.bench.remote import Answers
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import plain
from ckpt_horovod_tools.bench import figures
from ckpt_horovod_tools.bench.frequency import BOUND, frequencies
from ckpt_horovod_tools.bench.pair_run import PairRun
from ckpt_horovod_tools.bench.settings import RANKS, HorovodSettings, Schedule
from ckpt_horovod_tools.bench.ways import BASES, SAVING, TORCH_SAVE

_MEMORY_STATES = 6
"""Of each rank, in sizes of the state: what trains with its gradients, staging memory of two saves, what
torch.save gathers, dirty pages."""

_DISK_STATES = 6
_PROCESS_BYTES = 500 * 2**20
_IN_STEP_STALL = "its stall is part of step(), and is not told apart"

Windows = dict[str, Answers]


def run(
    settings: HorovodSettings, *, notify: Callable[[str], None] = lambda message: None
) -> Report:
    """Measure everything that `settings` asks for; what is written is removed again.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: there is no room for the run, or Horovod is not installed.
    """
    fields = {**plain(settings), "leaves": 0, "ranks": RANKS}
    report = Report("horovod", fields, describe(settings.root))
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * _DISK_STATES,
        memory_bytes=RANKS * (settings.state_bytes * _MEMORY_STATES + _PROCESS_BYTES),
    )
    with (
        work_folder(settings.root) as folder,
        PairRun(settings, folder, report, notify) as pair,
    ):
        _check(pair, settings)
        for _ in pair.rounds("training"):
            for every in pair.shuffled(settings.intervals):
                _note(report, settings.schedule(every), _train(pair, settings, every))
    _note_frequencies(report)
    return report


def _check(pair: PairRun, settings: HorovodSettings) -> None:
    """What each way saves is what training had; this also warms it up."""
    for name in pair.names():
        if name in BASES:
            continue
        pair.notify(f"check: {name}")
        answers = pair.ask(name, "check", **_arguments(settings))
        if answers is not None:
            entrant = pair.report.entrants[name]
            digests = {digest for a in answers for digest in (a["live"], a["saved"])}
            entrant.restored = len(digests) == 1
            entrant.digest = answers[0]["saved"]
            if settings.staging_bytes is not None and name != TORCH_SAVE:
                entrant.settings += f", staging_bytes={settings.staging_bytes}"


def _train(pair: PairRun, settings: HorovodSettings, every: int) -> Windows:
    """One window of each way, in random order; without those that failed."""
    windows: Windows = {}
    schedule = dataclasses.asdict(settings.schedule(every))
    for name in pair.shuffled(pair.names()):
        answers = pair.ask(name, "train", schedule=schedule, **_arguments(settings))
        if answers is not None:
            windows[name] = answers
    return windows


def _arguments(settings: HorovodSettings) -> dict[str, Any]:
    return {
        "size": dataclasses.asdict(settings.model),
        "staging_bytes": settings.staging_bytes,
        "timeout_s": settings.timeout_s,
    }


def _note(report: Report, schedule: Schedule, windows: Windows) -> None:
    """One round of one interval."""
    seconds = {name: max(a["iteration_s"] for a in windows[name]) for name in windows}
    for name, answers in windows.items():
        report.add(figures.iteration(schedule.every), name, seconds[name])
        if name in SAVING:
            for base in seconds.keys() & set(BASES):
                over = seconds[name] / seconds[base] - 1
                report.add(figures.overhead(schedule.every, base), name, over)
            _note_saves(report, schedule, name, answers)
        # The size that the report names is the one that was measured, not the one that was asked for.
        first = answers[0]
        report.settings.update(state_bytes=first["state_bytes"], leaves=first["leaves"])


def _note_saves(report: Report, schedule: Schedule, name: str, answers: Answers) -> None:
    stalls = [answer["stalled_s"] for answer in answers if answer["stalled_s"] is not None]
    if stalls:
        stall_s = max(stalls) / schedule.timed_saves
        report.add(results.train_stall(schedule.every), name, stall_s)
    remarks = [text for answer in answers for text in answer["remarks"]]
    notes = report.entrants[name].notes
    for text in remarks if stalls else (_IN_STEP_STALL, *remarks):
        if text not in notes:
            notes.append(text)
    if any(answer["written_bytes"] for answer in answers):  # in memory nothing is counted
        for rank, answer in enumerate(answers):
            saved_bytes = schedule.saves * answer["state_bytes"]
            report.add(figures.written(rank), name, answer["written_bytes"] / saved_bytes)


def _note_frequencies(report: Report) -> None:
    rows = {name: frequencies(report, name) for name in report.entrants if name in SAVING}
    report.more["frequency"] = {
        "bound": BOUND,
        "ways": {name: [dataclasses.asdict(row) for row in rows[name]] for name in rows},
    }
