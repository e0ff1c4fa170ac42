"""The suite `deepspeed`: its settings, the order of a run, and what is noted. Needs no torch.

At each stage of ZeRO every way has its try first: it saves, goes on training, and what it saved is loaded and
compared. Those that can then take turns in rounds of random order: one save in training; and windows of steps
at each interval, the ones without saves among them, within the same minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import ClassVar, Self

from rich.table import Table
from rich.text import Text

from ckpt_core.bench import proc
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.plot import bars_of
from ckpt_core.bench.remote import Answers
from ckpt_core.bench.results import Report, per_gb
from ckpt_core.bench.run import Run
from ckpt_core.bench.settings import RunSettings, model_of
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.views import Area, Over, Own, Several, View
from ckpt_core.bench.window import Window
from ckpt_core.errors import ConfigError
from ckpt_core.units import align_up
from ckpt_deepspeed_tools.bench import ways
from ckpt_deepspeed_tools.bench.crew import CANNOT_LOAD, CANNOT_RUN, StageCrew
from ckpt_deepspeed_tools.bench.ways import BASE, FILELESS, NAMES, OWN, RANKS, WAYS

_STAGES = (1, 2, 3)
_WAY_STATES = 3
"""Memory that each way holds between its turns, in sizes of the state: training, gradients, staging."""

_TURN_STATES = 6
"""And in its turn: what is in flight, dirty pages."""

_PROCESS_BYTES = 400 * 2**20


class DeepSpeedMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings(RunSettings):
    """One run under DeepSpeed; see `RunSettings` for the other fields.

    Attributes:
        state_bytes: about the tensors of one checkpoint, of all ranks together.
        stages: of ZeRO.
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps under the clock in a window of `train`.
        lead_steps: steps before the clock in it.
        quiet_steps: steps before each save of `save` that tell what a step takes without one.
        tail_steps: least steps after it.
        contenders: names of ways; the one without saves always runs.
        staging_bytes: bound of our staging memory in each process; None leaves the engine's default.
    """

    state_bytes: int = 64 * 10**6
    stages: tuple[int, ...] = (1, 3)
    intervals: tuple[int, ...] = (1, 5, 20)
    train_steps: int = 10
    lead_steps: int = 2
    quiet_steps: int = 5
    tail_steps: int = 2
    contenders: tuple[str, ...] = NAMES
    measures: tuple[DeepSpeedMeasure, ...] = tuple(DeepSpeedMeasure)
    staging_bytes: int | None = None

    suite: ClassVar = "deepspeed"
    leasts: ClassVar = {
        "train_steps": 2,
        "lead_steps": 1,
        "quiet_steps": 1,
        "tail_steps": 1,
        "state_bytes": 2**20,
    }
    trial: ClassVar = {
        "state_bytes": 2 * 2**20,
        "rounds": 2,
        "intervals": (1, 2),
        "train_steps": 2,
        "lead_steps": 1,
        "quiet_steps": 2,
    }

    def quick(self) -> Self:
        """A rank that does not answer is not waited for as long either."""
        return dataclasses.replace(super().quick(), timeout_s=min(self.timeout_s, 120.0))

    def check(self) -> None:
        """Stages are those that have something to partition."""
        if not self.stages or set(self.stages) - set(_STAGES):
            raise ConfigError(f"stages={self.stages} must be some of {_STAGES}")

    def window(self, every: int) -> Window:
        """The window with a save every so many steps."""
        return Window(every, self.lead_steps, align_up(self.train_steps, every))


def measure(run: Run[DeepSpeedSettings]) -> None:
    """Everything that the settings ask for.

    Raises:
        ConfigError: there is no room for the run, or DeepSpeed is not installed.
    """
    for package in ("deepspeed", "ckpt_deepspeed"):
        if find_spec(package) is None:
            text = f"{package} is not installed: {ways.INSTALL}"
            raise ConfigError(f"the suite deepspeed cannot run: {text}")
    _check_room(run.settings)
    run.report.more["state"] = {}
    with StageCrew(run) as crew:
        for stage in run.settings.stages:
            with crew.at(stage):
                _stage(run, crew, stage)
    _name_those_that_cannot_run(run.report)


def _check_room(settings: DeepSpeedSettings) -> None:
    processes = RANKS * len(settings.contenders) * _PROCESS_BYTES
    states = _WAY_STATES * len(settings.contenders) + _TURN_STATES
    saves = max(window.steps // window.every for window in map(settings.window, settings.intervals))
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * 2 * (saves + 3),  # some ways write parts of it twice
        memory_bytes=settings.state_bytes * states + processes,
    )


def _stage(run: Run[DeepSpeedSettings], crew: StageCrew, stage: int) -> None:
    settings = run.settings
    for name in crew.names():
        run.notify(f"ZeRO {stage}, trying: {name}")
        if crew.joined(name):
            _try(run, crew, stage, name)
    if DeepSpeedMeasure.SAVE in settings.measures:
        for name in crew.turns(f"ZeRO {stage}, saves", reference=False):
            _save(run, crew, stage, name)
    if DeepSpeedMeasure.TRAIN in settings.measures:
        for _ in crew.rounds(f"ZeRO {stage}, training"):
            for every in crew.shuffled(settings.intervals):
                window = settings.window(every)
                _note_training(run.report, stage, window, _train(run, crew, window))


def _try(run: Run[DeepSpeedSettings], crew: StageCrew, stage: int, name: str) -> None:
    """Build, save several times, compare; memory is measured meanwhile."""
    settings = run.settings
    size, engine = (
        dataclasses.asdict(model_of(settings.state_bytes)),
        {"timeout": settings.timeout_s},
    )
    if settings.staging_bytes is not None:
        engine["staging_bytes"] = settings.staging_bytes
    built = crew.ask(name, "build", name=name, stage=stage, size=size, engine=engine)
    if built is None or name in FILELESS:
        crew.passed(name)
        return
    pids = crew.team(name).pids
    before = [proc.own_memory_bytes(pid) for pid in pids]
    with ExitStack() as stack:
        peaks = [stack.enter_context(proc.PeakMemory(pid)) for pid in pids]
        warmed = crew.ask(name, "warm")
    checked = crew.ask(name, "check")
    if warmed is None or checked is None:
        return
    _note_check(run.report, stage, name, warmed, checked)
    if DeepSpeedMeasure.SAVE in settings.measures:
        extras = [peak.peak_bytes - own for peak, own in zip(peaks, before, strict=True)]
        # A way that writes from where the state lies may end a few pages below its start.
        run.report.add(ways.MEMORY(stage), name, max(1, *extras))
    crew.passed(name)
    crew.ask(name, "tidy")


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
    if not found:
        report.note_size(size)
    found[name] = size


def _save(run: Run[DeepSpeedSettings], crew: StageCrew, stage: int, name: str) -> None:
    """One save in training."""
    settings, report = run.settings, run.report
    answers = crew.ask(name, "save", quiet=settings.quiet_steps, tail=settings.tail_steps)
    if answers is None:
        return
    call_s = _slower(answers, "call_s")
    report.add(ways.CALL(stage), name, call_s)
    report.add(ways.EXTRA(stage), name, _slower(answers, "extra_s"))
    both = max(answer["call_s"] + answer["extra_s"] for answer in answers)
    report.add(ways.STALL(stage), name, both)
    if name not in FILELESS:
        _note_files(report, stage, name, answers, call_s)
    crew.ask(name, "tidy")


def _note_files(report: Report, stage: int, name: str, answers: Answers, call_s: float) -> None:
    """When they are there, and what of them was written."""
    latest_s = answers[0]["latest_s"]
    report.add(ways.LATEST(stage), name, latest_s)
    if WAYS[name].fsyncs == "no":
        fsync_s = _slower(answers, "fsync_s")
        report.add(ways.FSYNC(stage), name, fsync_s)
        durable_s = latest_s + fsync_s
    else:
        # Ours name what is durable; another fsyncs last, within the call.
        durable_s = answers[0]["durable_s"] if name in OWN else call_s
    report.add(ways.DURABLE(stage), name, durable_s)
    _note_bytes(report, stage, name, answers)


def _slower(answers: Answers, what: str) -> float:
    found: float = max(answer[what] for answer in answers)
    return found


def _note_bytes(report: Report, stage: int, name: str, answers: Answers) -> None:
    state_bytes = report.more["state"][str(stage)][name]["state_bytes"]
    shares = [answer["written_bytes"] / state_bytes for answer in answers]
    if any(shares):  # in memory nothing is counted
        report.add(ways.AMPLIFICATION(stage), name, sum(shares))
        for rank, share in enumerate(shares):
            report.add(ways.WRITTEN(stage, rank), name, share)


def _train(run: Run[DeepSpeedSettings], crew: StageCrew, window: Window) -> dict[str, Answers]:
    """One window of each way, in random order; without those that failed."""
    windows: dict[str, Answers] = {}
    for name in crew.shuffled(crew.names()):
        saves = 0 if name == BASE else window.every
        answers = crew.ask(name, "train", every=saves, lead=window.lead, steps=window.steps)
        if answers is not None:
            windows[name] = answers
            crew.ask(name, "tidy")
    return windows


def _note_training(report: Report, stage: int, window: Window, windows: dict[str, Answers]) -> None:
    """One round of one interval."""
    every = window.every
    worked_s = {name: sum(a["processor_s"] for a in windows[name]) for name in windows}
    seconds = {name: _slower(answers, "step_s") for name, answers in windows.items()}
    for name, step_s in seconds.items():
        report.add(ways.STEP(stage, every), name, step_s)
        if name != BASE:
            report.add(ways.SLOWDOWN(stage, every), name, step_s / seconds[BASE])
        if name not in FILELESS:
            saved = window.timed_saves * report.more["state"][str(stage)][name]["state_bytes"]
            value = per_gb(worked_s[name] - worked_s[BASE], saved)
            report.add(ways.PROCESSOR(stage, every), name, value)


def _name_those_that_cannot_run(report: Report) -> None:
    """A way that ran at no stage has a reason rather than only remarks."""
    for name, errors in report.more[CANNOT_RUN].items():
        entrant = report.entrants[name]
        if len(errors) == len(report.settings["stages"]) and entrant.reason is None:
            entrant.reason = f"cannot run here: {next(iter(errors.values()))}"
            entrant.notes.clear()
    report.tell_bound(OURS)


def _figures(report: Report) -> Iterator[View]:
    for stage in report.settings["stages"]:
        for title, columns in ways.STEADY:
            yield Several(f"ZeRO {stage}: {title}", [(head, make(stage)) for head, make in columns])
        for title, family in (
            ("Step over the same without saves", ways.SLOWDOWN),
            ("Step", ways.STEP),
            ("Processor time of saves", ways.PROCESSOR),
        ):
            yield Over(title=f"ZeRO {stage}: {title}", make=partial(family, stage), drawn="")
    yield Own(_problems, _areas)


def _problems(report: Report) -> Iterator[Table]:
    """What peers cannot do here, in their own words."""
    table = Table(title="Cannot run or load here")
    for column in ("way", "ZeRO", "cannot", "its own error"):
        table.add_column(column)
    for section, what in ((CANNOT_RUN, "run"), (CANNOT_LOAD, "load")):
        for name, errors in report.more[section].items():
            for stage, error in errors.items():
                table.add_row(report.title(name), stage, what, Text(error))
    if table.row_count:
        yield table


def _areas(report: Report) -> Iterator[Area]:
    """Bars of one save, then lines over the interval, by stage."""
    stages: list[int] = report.settings["stages"]
    for make in (ways.CALL, ways.STALL, ways.DURABLE, ways.MEMORY):
        for figure in map(make, stages):
            if report.stats(figure):
                # A stall has differences in it, and may be 0.
                yield bars_of(report, figure, False)
    for stage in stages:
        title = f"ZeRO {stage}: training step over the same without saves"
        yield from Over(title=title, make=partial(ways.SLOWDOWN, stage), mark=1.0).areas(report)


SUITE = Suite(
    settings=DeepSpeedSettings,
    schedule=measure,
    figures=_figures,
    fields=lambda settings: {"leaves": 0, "ranks": RANKS},
)
