"""The order of a run of the suite `deepspeed`, and what is noted.

At each stage of ZeRO every way has its try first: it saves, goes on training, and what it saved is loaded and
compared. Those that can then take turns in rounds of random order: one save in training; and windows of steps
at each interval, the ones without saves among them, within the same minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ckpt_core.bench import proc
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.machine import check_room, describe, work_folder
from ckpt_core.bench.remote import Answers
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import plain
from ckpt_deepspeed_tools.bench import figures
from ckpt_deepspeed_tools.bench.crew import CANNOT_LOAD, CANNOT_RUN, DeepSpeedCrew, check_installed
from ckpt_deepspeed_tools.bench.settings import RANKS, DeepSpeedMeasure, DeepSpeedSettings
from ckpt_deepspeed_tools.bench.ways import BASE, OWN, WAYS

_WAY_STATES = 3
"""Memory that each way holds between its turns, in sizes of the state: training, gradients, staging."""

_TURN_STATES = 6
"""And in its turn: what is in flight, dirty pages."""

_PROCESS_BYTES = 400 * 2**20

Windows = dict[str, Answers]


def run(
    settings: DeepSpeedSettings, *, notify: Callable[[str], None] = lambda message: None
) -> Report:
    """Measure everything that `settings` asks for; what is written is removed again.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: there is no room for the run, or DeepSpeed is not installed.
    """
    check_installed()
    fields = {**plain(settings), "leaves": 0, "ranks": RANKS}
    report = Report("deepspeed", fields, describe(settings.root))
    report.more["state"] = {}
    _check_room(settings)
    with (
        work_folder(settings.root) as folder,
        DeepSpeedCrew(settings, folder, report, notify) as crew,
    ):
        for stage in settings.stages:
            with crew.stage(stage):
                _stage(crew, settings, stage)
    _name_those_that_cannot_run(report)
    return report


def _check_room(settings: DeepSpeedSettings) -> None:
    processes = RANKS * len(settings.contenders) * _PROCESS_BYTES
    states = _WAY_STATES * len(settings.contenders) + _TURN_STATES
    saves = max(window.steps // window.every for window in map(settings.window, settings.intervals))
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * 2 * (saves + 3),  # some ways write parts of it twice
        memory_bytes=settings.state_bytes * states + processes,
    )


def _stage(crew: DeepSpeedCrew, settings: DeepSpeedSettings, stage: int) -> None:
    for name in crew.names():
        crew.notify(f"ZeRO {stage}, trying: {name}")
        if crew.start(name):
            _try(crew, settings, stage, name)
    if DeepSpeedMeasure.SAVE in settings.measures:
        for _ in crew.rounds(f"ZeRO {stage}, saves"):
            for name in crew.shuffled([name for name in crew.names() if name != BASE]):
                _save(crew, settings, stage, name)
    if DeepSpeedMeasure.TRAIN in settings.measures:
        for _ in crew.rounds(f"ZeRO {stage}, training"):
            for every in crew.shuffled(settings.intervals):
                _note_training(crew.report, stage, every, _train(crew, settings, every))


def _try(crew: DeepSpeedCrew, settings: DeepSpeedSettings, stage: int, name: str) -> None:
    """Build, save several times, compare; memory is measured meanwhile."""
    size = dataclasses.asdict(settings.model)
    built = crew.ask(name, "build", name=name, stage=stage, size=size, engine=_options(settings))
    if built is None or name == BASE:
        crew.passed(name)
        return
    pids = crew.pids(name)
    before = [proc.own_memory_bytes(pid) for pid in pids]
    with ExitStack() as stack:
        peaks = [stack.enter_context(proc.PeakMemory(pid)) for pid in pids]
        warmed = crew.ask(name, "warm")
    checked = crew.ask(name, "check")
    if warmed is None or checked is None:
        return
    _note_check(crew.report, stage, name, warmed, checked)
    if DeepSpeedMeasure.SAVE in settings.measures:
        extras = [peak.peak_bytes - own for peak, own in zip(peaks, before, strict=True)]
        # A way that writes from where the state lies may end a few pages below its start.
        crew.report.add(figures.memory(stage), name, max(1, *extras))
    crew.passed(name)
    crew.ask(name, "tidy")


def _options(settings: DeepSpeedSettings) -> dict[str, Any]:
    """For our engine, beside what the way says."""
    given = {} if settings.staging_bytes is None else {"staging_bytes": settings.staging_bytes}
    return {"timeout": settings.timeout_s, **given}


def _note_check(report: Report, stage: int, name: str, warmed: Answers, checked: Answers) -> None:
    entrant = report.entrants[name]
    equal = [a["live"] == b["saved"] for a, b in zip(warmed, checked, strict=True)]
    named = all(answer["latest"] for answer in checked)
    entrant.restored = entrant.restored is not False and all(equal) and named
    digests = [answer["saved"] for answer in checked]
    entrant.digest = " ".join(filter(None, [entrant.digest, f"ZeRO {stage}:", *digests]))
    problem = checked[0]["problem"]
    if problem is not None:
        report.more[CANNOT_LOAD].setdefault(name, {})[str(stage)] = problem
        entrant.notes.append(f"at ZeRO {stage} only DeepSpeed's default engine loads what it saved")
    size = {key: checked[0][key] for key in ("state_bytes", "leaves", "file_bytes")}
    found = report.more["state"].setdefault(str(stage), {})
    if not found:  # the size that the report names is one that was measured
        report.settings.update(state_bytes=size["state_bytes"], leaves=size["leaves"])
    found[name] = size


def _save(crew: DeepSpeedCrew, settings: DeepSpeedSettings, stage: int, name: str) -> None:
    """One save in training."""
    answers = crew.ask(name, "save", quiet=settings.quiet_steps, tail=settings.tail_steps)
    if answers is None:
        return
    report, latest_s = crew.report, answers[0]["latest_s"]
    call_s = max(answer["call_s"] for answer in answers)
    fsync_s = max(answer["fsync_s"] for answer in answers)
    report.add(figures.call(stage), name, call_s)
    report.add(figures.extra(stage), name, max(answer["extra_s"] for answer in answers))
    both = max(answer["call_s"] + answer["extra_s"] for answer in answers)
    report.add(figures.stall(stage), name, both)
    report.add(figures.latest(stage), name, latest_s)
    if WAYS[name].fsyncs == "no":
        report.add(figures.fsync(stage), name, fsync_s)
        durable_s = latest_s + fsync_s
    else:
        # Ours name what is durable; another fsyncs last, within the call.
        durable_s = answers[0]["durable_s"] if name in OWN else call_s
    report.add(figures.durable(stage), name, durable_s)
    _note_bytes(report, stage, name, answers)
    crew.ask(name, "tidy")


def _note_bytes(report: Report, stage: int, name: str, answers: Answers) -> None:
    state_bytes = report.more["state"][str(stage)][name]["state_bytes"]
    shares = [answer["written_bytes"] / state_bytes for answer in answers]
    if any(shares):  # in memory nothing is counted
        report.add(figures.amplification(stage), name, sum(shares))
        for rank, share in enumerate(shares):
            report.add(figures.written(stage, rank), name, share)


def _train(crew: DeepSpeedCrew, settings: DeepSpeedSettings, every: int) -> Windows:
    """One window of each way, in random order; without those that failed."""
    windows: Windows = {}
    window = settings.window(every)
    for name in crew.shuffled(crew.names()):
        saves = 0 if name == BASE else every
        answers = crew.ask(name, "train", every=saves, lead=window.lead, steps=window.steps)
        if answers is not None:
            windows[name] = answers
            crew.ask(name, "tidy")
    return windows


def _note_training(report: Report, stage: int, every: int, windows: Windows) -> None:
    """One round of one interval."""
    seconds = {name: max(a["step_s"] for a in windows[name]) for name in windows}
    for name, step_s in seconds.items():
        report.add(figures.step(stage, every), name, step_s)
        if name != BASE:
            report.add(figures.slowdown(stage, every), name, step_s / seconds[BASE])


def _name_those_that_cannot_run(report: Report) -> None:
    """A way that ran at no stage has a reason rather than only remarks."""
    for name, errors in report.more[CANNOT_RUN].items():
        entrant = report.entrants[name]
        if len(errors) == len(report.settings["stages"]) and entrant.reason is None:
            entrant.reason = f"cannot run here: {next(iter(errors.values()))}"
            entrant.notes.clear()
    ours = report.entrants.get(OURS)
    if ours is not None and report.settings["staging_bytes"] is not None:
        ours.settings += f", staging_bytes={report.settings['staging_bytes']}"
