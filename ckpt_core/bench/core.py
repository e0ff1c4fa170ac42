"""The suite `core`: this engine in one process, beside other checkpointers.

    save, restore   one large state: persist, stall, memory, amplification; restores, cold and warm
    leaves          a state of many small tensors, where bytes cost nothing and leaves do
    train           a small model: steps with saves at each interval over steps without, in the same turn
    still           a state of which 99 % stays the same, and ways that write only what has changed
    start           a process of its own: from its start to the first step with a state that was restored

Contenders take turns in rounds of random order, so that a disk whose speed drifts, or a neighbour that wakes
up, hits all of them. Only one process works at a time; the others wait for a message. After each turn the
disk is left clean (old steps removed, dirty pages written), outside the clock.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from ckpt_core.bench import cache, proc
from ckpt_core.bench.checks import check_state
from ckpt_core.bench.contenders import NAMES, SHARING
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.results import (
    SLOWDOWN,
    TRAIN_BASE,
    TRAIN_PROCESSOR,
    TRAIN_STALL,
    Figure,
    Unit,
    per_gb,
)
from ckpt_core.bench.run import Run
from ckpt_core.bench.settings import ModelSize, RunSettings
from ckpt_core.bench.starts import FIGURES as STARTS
from ckpt_core.bench.starts import measure_starts
from ckpt_core.bench.still import FIGURES as STILL
from ckpt_core.bench.still import WAYS, measure_still
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.team import Launcher
from ckpt_core.bench.views import One, Over, View

_MODEL = ModelSize()
_SMALL_LEAF_BYTES = 1024
_PROCESS_BYTES = 300 * 2**20
_SPARE_STATES = 4
"""Memory that must stay free, in sizes of the state: for the copies of the contender whose turn it is,
and for the page cache, whose share of dirty pages would else throttle the buffered ones."""

_CHECK_STEP = 1_000_000
_COLD_SHARE = 0.9
"""A restore counts as cold when at least this part of the state came from storage."""

_NOT_COLD = "cold restore not measured: the page cache could not be dropped"
LAUNCH = Launcher(worker="ckpt_core.bench.worker:Worker")


class Measure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    RESTORE = "restore"
    LEAVES = "leaves"
    TRAIN = "train"
    STILL = "still"
    START = "start"


_UNASKED = (Measure.SAVE, Measure.RESTORE, Measure.LEAVES, Measure.TRAIN)
"""A start imports torch anew each time, and `still` has ways of its own: where somebody asks for them."""


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """One benchmark run; see `RunSettings` for the other fields.

    Attributes:
        state_bytes: size of the state that `save` and `restore` measure.
        leaves: tensors in that state.
        small_leaves: tensors of 1 KiB in the state that `leaves` measures.
        warmups: untimed saves before the first round (staging memory, recycled files).
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps of one training window; a window is a multiple of its interval.
        model: the model of `train`.
        staging_bytes: bound of our staging memory; None leaves the engine's default.
    """

    state_bytes: int = 768 * 2**20
    leaves: int = 384
    small_leaves: int = 10_000
    warmups: int = 3
    intervals: tuple[int, ...] = (1, 5, 10, 25, 50)
    train_steps: int = 10
    model: ModelSize = _MODEL
    contenders: tuple[str, ...] = (*NAMES, *SHARING)
    measures: tuple[Measure, ...] = _UNASKED
    staging_bytes: int | None = None

    suite: ClassVar = "core"
    leasts: ClassVar = {"leaves": 4, "small_leaves": 1, "warmups": 1, "train_steps": 2}
    trial: ClassVar = {
        "state_bytes": 8 * 2**20,
        "leaves": 24,
        "small_leaves": 200,
        "rounds": 2,
        "intervals": (1, 2),
        "train_steps": 2,
        "model": ModelSize(width=32, layers=1, vocabulary=64, batch=1, tokens=8),
    }

    def check(self) -> None:
        """So many leaves must have room in the state."""
        check_state(state_bytes=self.state_bytes, leaves=self.leaves)


PERSIST = Figure("persist", "Persist throughput, save() to durable", Unit.BYTES_PER_S, True)
STALL = Figure("stall", "Stall of save(): call, then barrier at once", Unit.SECONDS)
STALL_CALL = Figure("stall_call", "Stall of save(): the call alone", Unit.SECONDS)
STALL_BARRIER = Figure("stall_barrier", "Stall of save(): the barrier alone", Unit.SECONDS)
PROCESSOR = Figure("processor", "Processor time of a save, all threads", Unit.SECONDS_PER_GB)
MEMORY = Figure("peak_memory", "Peak extra memory, seen from outside", Unit.BYTES)
AMPLIFICATION = Figure("write_amplification", "Bytes written / state bytes", Unit.TIMES)
RESTORE_WARM = Figure("restore_warm", "Restore into live tensors, cached", Unit.BYTES_PER_S, True)
RESTORE_COLD = Figure("restore_cold", "Restore into live tensors, cold", Unit.BYTES_PER_S, True)
LEAVES_STALL = Figure("small_leaves_stall", "Stall of save(), many small leaves", Unit.SECONDS)

_FIGURES: tuple[View, ...] = (
    One(PERSIST, drawn=True),
    One(STALL, drawn=True, logarithmic=True),
    One(STALL_CALL, drawn=True, logarithmic=True),
    One(STALL_BARRIER),
    One(PROCESSOR, drawn=True),
    One(RESTORE_WARM, drawn=True),
    One(RESTORE_COLD, drawn=True),
    One(LEAVES_STALL, drawn=True, logarithmic=True),
    One(MEMORY, drawn=True),
    One(AMPLIFICATION),
    *STARTS,
    *STILL,
    Over(
        title="Training step, times the same without saves", make=SLOWDOWN, ratios=False, mark=1.0
    ),
    Over(
        title="Stall of a save in training, ms",
        make=TRAIN_STALL,
        ratios=False,
        drawn="Stall of a save in training",
    ),
    Over(
        title="Processor time of saves in training, s/GB",
        make=TRAIN_PROCESSOR,
        ratios=False,
        drawn="",
    ),
)


def measure(run: Run[Settings]) -> None:
    """Everything that the settings ask for.

    Raises:
        ConfigError: there is no room for the run; nothing was written.
    """
    measures = set(run.settings.measures)
    if Measure.STILL in measures:
        with Crew(run, LAUNCH) as crew:
            _start(run, crew, WAYS)
            measure_still(crew)
    if measures <= {Measure.STILL}:
        return
    with Crew(run, LAUNCH) as crew:
        _start(run, crew, NAMES)
        if {Measure.SAVE, Measure.RESTORE} & measures:
            _large(run, crew)
        if Measure.LEAVES in measures:
            _small_leaves(run, crew)
        if Measure.TRAIN in measures:
            _train(run, crew)
        if Measure.START in measures:
            measure_starts(crew)


def _start(run: Run[Settings], crew: Crew, names: Iterable[str]) -> None:
    settings = run.settings
    crew.enter(name for name in names if name in settings.contenders)
    disk_bytes, memory_bytes = 0, settings.state_bytes * _SPARE_STATES
    for hello in crew.start().values():
        disk_bytes += settings.state_bytes * hello["disk_states"]
        memory_bytes += settings.state_bytes * hello["memory_states"] + _PROCESS_BYTES
    if Measure.TRAIN in settings.measures:
        disk_bytes += settings.model.state_bytes * (settings.train_steps + 4)
    check_room(settings.root, disk_bytes=disk_bytes, memory_bytes=memory_bytes)


def _large(run: Run[Settings], crew: Crew) -> None:
    """Persist, stall, memory, amplification, restore: one large state."""
    settings = run.settings
    size = {"state_bytes": settings.state_bytes, "leaves": settings.leaves}
    state_bytes: dict[str, int] = {}
    for name in crew.names():
        run.notify(f"warm-up: {name}")
        built = crew.ask_one(name, "build", workload="large", **size)
        if built is not None:
            state_bytes[name] = built["state_bytes"]
            _warm_up(run, crew, name)
    if Measure.SAVE in settings.measures:
        for name in crew.turns("save"):
            _save_turn(run, crew, name, state_bytes[name])
    if Measure.RESTORE in settings.measures:
        for name in crew.turns("restore"):
            _restore_turn(run, crew, name, state_bytes[name])
        for name in crew.names(reference=False):
            answer = crew.ask_one(name, "check", step=_CHECK_STEP)
            if answer is not None:
                run.report.entrants[name].compare(answer["saved"], answer["restored"])
    _drop(crew)


def _warm_up(run: Run[Settings], crew: Crew, name: str) -> None:
    """Open the contender and save untimed; its memory is measured meanwhile, from before it opens."""
    (pid,) = crew.team(name).pids
    before = proc.memory_bytes(pid)
    with proc.PeakMemory(pid) as memory:
        _open_and_save(run, crew, name, "large")
    alive = name in crew.names(reference=False)
    if alive and Measure.SAVE in run.settings.measures:
        # A contender that stages nothing may end below its start by a few pages.
        run.report.add(MEMORY, name, max(1, memory.peak_bytes - before))


def _open_and_save(run: Run[Settings], crew: Crew, name: str, folder: str) -> None:
    settings = run.settings
    bounds = {"staging_bytes": settings.staging_bytes, "timeout_s": settings.timeout_s}
    crew.ask(name, "open", folder=folder, **bounds)
    for _ in range(settings.warmups):
        crew.ask(name, "save")
    _tidy(crew, name)


def _tidy(crew: Crew, name: str) -> None:
    answer = crew.ask_one(name, "tidy")
    if answer is not None:
        crew.report.entrants[name].settings = answer["settings"]


def _drop(crew: Crew) -> None:
    for name in crew.names():
        crew.ask(name, "drop")


def _save_turn(run: Run[Settings], crew: Crew, name: str, state_bytes: int) -> None:
    report = run.report
    answer = crew.ask_one(name, "save")
    if answer is None:
        return
    report.add(PERSIST, name, state_bytes / answer["persist_s"])
    if not report.entrants[name].reference:
        report.add(STALL, name, answer["call_s"] + answer["barrier_s"])
        report.add(STALL_CALL, name, answer["call_s"])
        report.add(STALL_BARRIER, name, answer["barrier_s"])
        report.add(PROCESSOR, name, per_gb(answer["processor_s"], state_bytes))
        if answer["written_bytes"]:  # a filesystem in memory counts nothing
            report.add(AMPLIFICATION, name, answer["written_bytes"] / state_bytes)
    _tidy(crew, name)


def _restore_turn(run: Run[Settings], crew: Crew, name: str, state_bytes: int) -> None:
    report, folder = run.report, crew.team(name).root
    if not report.entrants[name].reference:
        cache.warm(folder)
        answer = crew.ask_one(name, "restore")
        if answer is not None:
            report.add(RESTORE_WARM, name, state_bytes / answer["restore_s"])
    cache.drop(folder)
    answer = crew.ask_one(name, "restore")
    if answer is None:
        return
    if answer["read_bytes"] >= _COLD_SHARE * state_bytes:
        report.add(RESTORE_COLD, name, state_bytes / answer["restore_s"])
    else:
        report.entrants[name].remark(_NOT_COLD)


def _build_all(run: Run[Settings], crew: Crew, title: str, workload: str, **size: Any) -> None:
    """A new workload for all that save a state; those that failed at the one before have another try."""
    crew.readmit()
    for name in crew.names(reference=False):
        run.notify(f"{title}, warm-up: {name}")
        if crew.ask(name, "build", workload=workload, **size) is not None:
            _open_and_save(run, crew, name, workload)


def _small_leaves(run: Run[Settings], crew: Crew) -> None:
    size = {"leaves": run.settings.small_leaves, "leaf_bytes": _SMALL_LEAF_BYTES}
    _build_all(run, crew, "small leaves", "small_leaves", **size)
    for name in crew.turns("small leaves", reference=False):
        answer = crew.ask_one(name, "save")
        if answer is not None:
            run.report.add(LEAVES_STALL, name, answer["call_s"] + answer["barrier_s"])
            _tidy(crew, name)
    _drop(crew)


def _train(run: Run[Settings], crew: Crew) -> None:
    _build_all(run, crew, "training", "training", **dataclasses.asdict(run.settings.model))
    for name in crew.turns("training", reference=False):
        _train_turn(run, crew, name)
    _drop(crew)


def _train_turn(run: Run[Settings], crew: Crew, name: str) -> None:
    settings, report = run.settings, run.report
    windows: dict[int, dict[str, Any]] = {}
    bases: list[dict[str, Any]] = []
    # Without saves first and last: a drift of the machine within the turn hits both sides alike.
    for every in (0, *crew.shuffled(settings.intervals), 0):
        unit = max(1, every)
        steps = max(2, unit * -(-settings.train_steps // unit))
        answer = crew.ask_one(name, "train", every=every, steps=steps)
        if answer is None:
            return
        if every:
            windows[every] = answer
        else:
            bases.append(answer)
        _tidy(crew, name)
    base_s, base_work_s = (
        statistics.mean(base[key] for base in bases) for key in ("step_s", "processor_s")
    )
    report.add(TRAIN_BASE, name, base_s)
    for every, window in windows.items():
        report.add(SLOWDOWN(every), name, window["step_s"] / base_s)
        worked_s = (window["processor_s"] - base_work_s) * every
        report.add(TRAIN_PROCESSOR(every), name, per_gb(worked_s, window["state_bytes"]))
        for stall_s in window["stalls_s"]:
            report.add(TRAIN_STALL(every), name, stall_s)


SUITE = Suite(settings=Settings, schedule=measure, figures=lambda report: _FIGURES)
