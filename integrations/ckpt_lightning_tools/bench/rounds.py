"""The order of a run of the suite `lightning`, and what is noted of each fit.

In a round, every way trains through the same window of steps, the one without saves among them, in random
order and one after the other: what a fit is compared with was measured within the same minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ckpt_core.bench import results
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.machine import check_room, describe, work_folder
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import ModelSize, plain
from ckpt_lightning_tools.bench import figures
from ckpt_lightning_tools.bench.crew import FitCrew
from ckpt_lightning_tools.bench.settings import LightningMeasure, LightningSettings, Window
from ckpt_lightning_tools.bench.ways import BASE

_MEMORY_STATES = 10
"""In sizes of the large state: what trains, clones and buffers of a save that queue up, dirty pages."""

_DISK_STATES = 6
_PROCESS_BYTES = 600 * 2**20
_NO_PEAK = "memory not measured: the kernel does not let a process forget its peak"

Answers = dict[str, dict[str, Any]]


def run(
    settings: LightningSettings, *, notify: Callable[[str], None] = lambda message: None
) -> Report:
    """Measure everything that `settings` asks for; what is written is removed again.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: there is no room for the run, or Lightning is not installed.
    """
    fields = {**plain(settings), "leaves": 0}  # until a model was built
    report = Report("lightning", fields, describe(settings.root))
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * _DISK_STATES,
        memory_bytes=settings.state_bytes * _MEMORY_STATES + 4 * _PROCESS_BYTES,
    )
    with work_folder(settings.root) as root, FitCrew(settings, root, report, notify) as crew:
        # Windows of the training model come first, while no process has had a large one.
        if LightningMeasure.TRAIN in settings.measures:
            _train(crew, settings)
        _check(crew, settings)
        if LightningMeasure.SAVE in settings.measures:
            _save(crew, settings)
    return report


def _train(crew: FitCrew, settings: LightningSettings) -> None:
    """The training model at every interval."""
    _warm_up(crew, settings, settings.model, settings.window(min(settings.intervals)))
    for _ in crew.rounds("training"):
        for every in crew.shuffled(list(settings.intervals)):
            answers = _fit_all(crew, settings, settings.model, settings.window(every))
            _note_training(crew.report, every, answers)
            if LightningMeasure.SAVE not in settings.measures:
                _note_size(crew.report, answers)


def _save(crew: FitCrew, settings: LightningSettings) -> None:
    """The large state."""
    model, window = settings.large_model(), settings.large_window()
    _warm_up(crew, settings, model, Window(every=1, lead=0, steps=1))
    for _ in crew.rounds("large state"):
        answers = _fit_all(crew, settings, model, window)
        _note_size(crew.report, answers)
        _note_large(crew.report, answers)


def _warm_up(crew: FitCrew, settings: LightningSettings, model: ModelSize, window: Window) -> None:
    """A fit that does not count: it builds the model, and imports what is imported late."""
    crew.notify("warm-up")
    _fit_all(crew, settings, model, window)


def _fit_all(
    crew: FitCrew, settings: LightningSettings, model: ModelSize, window: Window
) -> Answers:
    """One fit of each way, in random order; without those that failed."""
    answers: Answers = {}
    for name in crew.shuffled(crew.names()):
        answer = crew.ask(
            name,
            "fit",
            size=dataclasses.asdict(model),
            window=dataclasses.asdict(window),
            staging_bytes=settings.staging_bytes,
        )
        if answer is not None:
            answers[name] = answer
    return answers


def _note_size(report: Report, answers: Answers) -> None:
    """The size that the report names is the one that was measured, not the one that was asked for."""
    for answer in answers.values():
        report.settings.update(state_bytes=answer["state_bytes"], leaves=answer["leaves"])


def _note_training(report: Report, every: int, answers: Answers) -> None:
    base = answers.get(BASE)
    if base is None:
        return
    report.add(results.TRAIN_BASE, BASE, base["step_s"])
    for name, answer in answers.items():
        if name == BASE:
            continue
        report.add(results.slowdown(every), name, answer["step_s"] / base["step_s"])
        report.add(results.train_stall(every), name, answer["stall_s"])
        report.add(figures.fit_time(every), name, answer["fit_s"] / base["fit_s"])
        _note_memory(report, figures.memory(every), name, answer, base)


def _note_large(report: Report, answers: Answers) -> None:
    base = answers.get(BASE)
    if base is None:
        return
    for name, answer in answers.items():
        report.add(figures.LARGE_LONGEST, name, answer["longest_step_s"])
        report.add(figures.LARGE_STEP, name, answer["step_s"])
        report.add(figures.LARGE_FIT, name, answer["fit_s"])
        if name != BASE:
            report.add(figures.LARGE_STALL, name, answer["stall_s"])
            _note_memory(report, figures.LARGE_MEMORY, name, answer, base)


def _note_memory(
    report: Report,
    figure: results.Figure,
    name: str,
    answer: dict[str, Any],
    base: dict[str, Any],
) -> None:
    """What the fit took more than the one without saves."""
    if answer["grown_bytes"] is None or base["grown_bytes"] is None:
        notes = report.entrants[name].notes
        if _NO_PEAK not in notes:
            notes.append(_NO_PEAK)
        return
    # A way that writes from where the state lies may end a few pages below the other.
    report.add(figure, name, max(1, answer["grown_bytes"] - base["grown_bytes"]))


def _check(crew: FitCrew, settings: LightningSettings) -> None:
    """What each way saves is what training ended with."""
    for name in crew.names():
        if name == BASE:
            continue
        answer = crew.ask(name, "check", size=dataclasses.asdict(settings.model))
        if answer is not None:
            entrant = crew.report.entrants[name]
            entrant.restored = answer["live"] == answer["saved"]
            entrant.digest = answer["saved"]
    if OURS in crew.names() and settings.staging_bytes is not None:
        entrant = crew.report.entrants[OURS]
        entrant.settings += f", staging_bytes={settings.staging_bytes}"
