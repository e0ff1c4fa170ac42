"""Fits under a framework with a loop of its own: settings, figures, the order of a run. Needs no torch.

In a round, every way trains through the same window of steps, the one without saves among them, in random
order and one after the other: what a fit is compared with was measured within the same minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.results import (
    SLOWDOWN,
    TRAIN_BASE,
    TRAIN_PROCESSOR,
    TRAIN_STALL,
    Family,
    Figure,
    Report,
    Setup,
    Unit,
    per_gb,
)
from ckpt_core.bench.run import Run
from ckpt_core.bench.settings import ModelSize, RunSettings, model_of
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.team import Launch, Launcher
from ckpt_core.bench.views import One, Over, View
from ckpt_core.bench.window import Window
from ckpt_core.units import align_up

BASE = "no_checkpoint"

_MODEL = ModelSize(width=256, layers=2, vocabulary=1024, batch=2, tokens=64)

_MEMORY_STATES = 10
"""In sizes of the large state: what trains, clones and buffers of a save that queue up, dirty pages."""

_DISK_STATES = 6
_PROCESS_BYTES = 600 * 2**20
_NO_PEAK = "memory not measured: the kernel does not let a process forget its peak"

Answers = dict[str, dict[str, Any]]


class FitMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    TRAIN = "train"
    RESUME = "resume"


@dataclass(frozen=True, kw_only=True)
class FitSettings(RunSettings):
    """One run under a framework; see `RunSettings` for the other fields.

    Attributes:
        state_bytes: size of the state that `save` measures.
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps under the clock in a fit of `train`.
        lead_saves: saves before the clock starts; the first of a run costs most.
        save_every: steps between saves of `save`.
        saves: saves under the clock in a fit of `save`.
        model: the model of `train`.
        contenders: names of ways; the one without saves always runs.
        staging_bytes: bound of our staging memory; None leaves the engine's default.
        threads: of torch in each process; None leaves as many as there are processors.
        ways: how each contender is set up, in the order of the report.
        worker: module and class of the processes; a subclass of `FitWorker`.
    """

    state_bytes: int = 768 * 2**20
    intervals: tuple[int, ...] = (1, 5, 10, 25, 50)
    train_steps: int = 20
    lead_saves: int = 1
    save_every: int = 2
    saves: int = 1
    model: ModelSize = _MODEL
    measures: tuple[FitMeasure, ...] = tuple(FitMeasure)
    staging_bytes: int | None = None
    threads: int | None = None

    ways: ClassVar[Mapping[str, Setup]]
    worker: ClassVar[str]
    leasts: ClassVar = {
        "train_steps": 2,
        "lead_saves": 0,
        "save_every": 1,
        "saves": 1,
        "state_bytes": 2**20,
    }
    trial: ClassVar = {
        "state_bytes": 2 * 2**20,
        "rounds": 2,
        "intervals": (1, 3),
        "train_steps": 2,
        "save_every": 2,
        "threads": 1,
        "model": ModelSize(width=32, layers=1, vocabulary=64, batch=1, tokens=8),
    }

    @property
    def launch(self) -> Launch:
        """Starts the process of a way, or its ranks."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return Launcher(worker=self.worker, environment=threads)

    def window(self, every: int) -> Window:
        """The fit of `train` with a save every so many steps."""
        return Window(every, self._lead(every), align_up(self.train_steps, every))

    def large_window(self) -> Window:
        """The fit of `save`."""
        return Window(self.save_every, self._lead(self.save_every), self.save_every * self.saves)

    def large_model(self) -> ModelSize:
        """A model whose state is about `state_bytes`: as wide as leaves it a few layers."""
        return model_of(self.state_bytes)

    def _lead(self, every: int) -> int:
        if every == 1:
            return self.lead_saves + 2  # the first steps of a run are slow
        return every * (self.lead_saves + 1) - 1


FIT_TIME = Family("fit_every_{}", "End-to-end fit over none, a save every {} steps", Unit.TIMES)
"""Time of `Trainer.fit`, until it has returned, over the same without saves."""

MEMORY = Family(
    "peak_memory_every_{}", "Peak extra memory of a fit, a save every {} steps", Unit.BYTES
)
"""Peak resident memory of a fit, over that of the same without saves."""

LARGE_STALL = Figure("large_stall", "Large state: stall of a save", Unit.SECONDS)
LARGE_LONGEST = Figure("large_longest_step", "Large state: longest step", Unit.SECONDS)
LARGE_STEP = Figure("large_train_step", "Large state: step, saves among them", Unit.SECONDS)
LARGE_FIT = Figure("large_fit", "Large state: end-to-end fit", Unit.SECONDS)
LARGE_MEMORY = Figure("large_peak_memory", "Large state: peak extra memory", Unit.BYTES)
RESUME = Figure("resume", "Large state: from the call to the first step, resumed", Unit.SECONDS)
LARGE_PROCESSOR = Figure(
    "large_processor", "Large state: processor time of a save", Unit.SECONDS_PER_GB
)

_FIGURES: tuple[View, ...] = (
    Over(title="Training step over none", make=SLOWDOWN),
    Over(title="Stall of a save", make=TRAIN_STALL),
    Over(title="End-to-end fit over none", make=FIT_TIME),
    Over(title="Peak extra memory of a fit", make=MEMORY),
    Over(title="Processor time of saves", make=TRAIN_PROCESSOR, drawn=""),
    One(TRAIN_BASE, columns=False),
    One(LARGE_STALL, columns=False, drawn=True, logarithmic=True),
    One(LARGE_LONGEST, columns=False, drawn=True),
    One(LARGE_STEP, columns=False),
    One(LARGE_FIT, columns=False, drawn=True),
    One(LARGE_MEMORY, columns=False, drawn=True),
    One(LARGE_PROCESSOR, columns=False),
    One(RESUME, columns=False, drawn=True),
)


def measure(run: Run[FitSettings]) -> None:
    """Everything that the settings ask for.

    Raises:
        ConfigError: there is no room for the run, or the framework is not installed.
    """
    settings = run.settings
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * _DISK_STATES,
        memory_bytes=settings.state_bytes * _MEMORY_STATES + 4 * _PROCESS_BYTES,
    )
    with Crew(run, settings.launch) as crew:
        crew.enter_ways(settings.ways, always=(BASE,))
        crew.start(base=BASE)
        # Windows of the training model come first, while no process has had a large one.
        if FitMeasure.TRAIN in settings.measures:
            _train(run, crew)
        _check(run, crew)
        if FitMeasure.SAVE in settings.measures:
            _save(run, crew)
        if FitMeasure.RESUME in settings.measures:
            _resume(run, crew)


def _train(run: Run[FitSettings], crew: Crew) -> None:
    """The training model at every interval."""
    settings = run.settings
    _warm_up(run, crew, settings.model, settings.window(min(settings.intervals)))
    for _ in crew.rounds("training"):
        for every in crew.shuffled(settings.intervals):
            window = settings.window(every)
            answers = _fit_all(run, crew, settings.model, window)
            _note_training(run.report, window, answers)
            if FitMeasure.SAVE not in settings.measures:
                _note_size(run.report, answers)


def _save(run: Run[FitSettings], crew: Crew) -> None:
    """The large state."""
    model = run.settings.large_model()
    _warm_up(run, crew, model, Window(every=1, lead=0, steps=1))
    for _ in crew.rounds("large state"):
        window = run.settings.large_window()
        answers = _fit_all(run, crew, model, window)
        _note_size(run.report, answers)
        _note_large(run.report, window, answers)


def _resume(run: Run[FitSettings], crew: Crew) -> None:
    """The large state, saved once and resumed in turns, from the page cache; the first does not count."""
    size = dataclasses.asdict(run.settings.large_model())
    for name in crew.names(reference=False):
        run.notify(f"{name} trains up to where it is resumed")
        answer = crew.ask_one(name, "stop", size=size)
        if answer is not None:
            run.report.note_size(answer)
            crew.ask_one(name, "resume", size=size)
    for _ in crew.rounds("resume"):
        for name in crew.shuffled(crew.names(reference=False)):
            answer = crew.ask_one(name, "resume", size=size)
            if answer is not None:
                run.report.add(RESUME, name, answer["resume_s"])


def _warm_up(run: Run[FitSettings], crew: Crew, model: ModelSize, window: Window) -> None:
    """A fit that does not count: it builds the model, and imports what is imported late."""
    run.notify("warm-up")
    _fit_all(run, crew, model, window)


def _fit_all(run: Run[FitSettings], crew: Crew, model: ModelSize, window: Window) -> Answers:
    """One fit of each way, in random order; without those that failed."""
    told = {
        "size": dataclasses.asdict(model),
        "window": dataclasses.asdict(window),
        "staging_bytes": run.settings.staging_bytes,
    }
    return {name: answers[0] for name, answers in crew.ask_each("fit", **told).items()}


def _note_size(report: Report, answers: Answers) -> None:
    for answer in answers.values():
        report.note_size(answer)


def _note_training(report: Report, window: Window, answers: Answers) -> None:
    base, every = answers.get(BASE), window.every
    if base is None:
        return
    report.add(TRAIN_BASE, BASE, base["step_s"])
    for name, answer in answers.items():
        if name == BASE:
            continue
        report.add(SLOWDOWN(every), name, answer["step_s"] / base["step_s"])
        report.add(TRAIN_STALL(every), name, answer["stall_s"])
        report.add(FIT_TIME(every), name, answer["fit_s"] / base["fit_s"])
        _note_memory(report, MEMORY(every), name, answer, base)
        report.add(TRAIN_PROCESSOR(every), name, _processor(window, answer, base))


def _processor(window: Window, answer: dict[str, Any], base: dict[str, Any]) -> float:
    """Of a save, for each GB."""
    saved_bytes = window.timed_saves * answer["state_bytes"]
    return per_gb(answer["processor_s"] - base["processor_s"], saved_bytes)


def _note_large(report: Report, window: Window, answers: Answers) -> None:
    base = answers.get(BASE)
    if base is None:
        return
    for name, answer in answers.items():
        report.add(LARGE_LONGEST, name, answer["longest_step_s"])
        report.add(LARGE_STEP, name, answer["step_s"])
        report.add(LARGE_FIT, name, answer["fit_s"])
        if name != BASE:
            report.add(LARGE_STALL, name, answer["stall_s"])
            _note_memory(report, LARGE_MEMORY, name, answer, base)
            report.add(LARGE_PROCESSOR, name, _processor(window, answer, base))


def _note_memory(
    report: Report, figure: Figure, name: str, answer: dict[str, Any], base: dict[str, Any]
) -> None:
    """What the fit took more than the one without saves."""
    if answer["grown_bytes"] is None or base["grown_bytes"] is None:
        report.entrants[name].remark(_NO_PEAK)
        return
    # A way that writes from where the state lies may end a few pages below the other.
    report.add(figure, name, max(1, answer["grown_bytes"] - base["grown_bytes"]))


def _check(run: Run[FitSettings], crew: Crew) -> None:
    """What each way saves is what training ended with."""
    for name in crew.names(reference=False):
        answer = crew.ask_one(name, "check", size=dataclasses.asdict(run.settings.model))
        if answer is not None:
            run.report.entrants[name].compare(answer["live"], answer["saved"])
    if OURS in crew.names():
        run.report.tell_bound(OURS)


def suite_of_fits(settings: type[FitSettings]) -> Suite[FitSettings]:
    """The suite of a framework."""
    return Suite(
        settings=settings,
        schedule=measure,
        figures=lambda report: _FIGURES,
        fields=lambda settings: {"leaves": 0},  # until a model was built
    )
