"""The suite `horovod`: the ways that are compared, the figures, and the order of a run. Needs no torch.

In a round, every way trains through the same window of iterations, the two without saves among them, in
random order and one after the other: what a window is compared with was measured within the same minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from rich.table import Table

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.remote import Answers, ContenderFailed
from ckpt_core.bench.results import TRAIN_PROCESSOR, TRAIN_STALL, Report, per_gb
from ckpt_core.bench.run import Run
from ckpt_core.bench.settings import RunSettings, model_of
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.views import Over, Own, Several, View
from ckpt_core.bench.window import Window
from ckpt_core.errors import ConfigError
from ckpt_core.units import align_up
from ckpt_horovod_tools.bench.frequency import BOUND, frequencies
from ckpt_horovod_tools.bench.pair import RANKS, Pair
from ckpt_horovod_tools.bench.ways import (
    BASE,
    BASES,
    INSTALL,
    ITERATION,
    NAMES,
    NO_SPIN,
    SAVING,
    TORCH_SAVE,
    WAYS,
    WRITTEN,
    overhead,
)

_MEMORY_STATES = 6
"""Of each rank, in sizes of the state: what trains with its gradients, staging memory of two saves, what
torch.save gathers, dirty pages."""

_DISK_STATES = 6
_PROCESS_BYTES = 500 * 2**20
_IN_STEP_STALL = "its stall is part of step(), and is not told apart"


class HorovodMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class HorovodSettings(RunSettings):
    """One run under Horovod; see `RunSettings` for the other fields.

    Attributes:
        state_bytes: parameters and AdamW state of the model, the same on each rank.
        intervals: iterations between saves that are compared with no saves at all.
        train_steps: least iterations under the clock in a window.
        warm_saves: saves at the start of a window, before the clock.
        lead_steps: iterations before the clock, those with `warm_saves` among them.
        contenders: names of ways; the two without saves always run.
        staging_bytes: bound of our staging memory in each process; None leaves the engine's default.
    """

    state_bytes: int = 200 * 10**6
    intervals: tuple[int, ...] = (1, 5, 10, 20)
    train_steps: int = 20
    warm_saves: int = 3
    lead_steps: int = 8
    contenders: tuple[str, ...] = NAMES
    measures: tuple[HorovodMeasure, ...] = tuple(HorovodMeasure)
    staging_bytes: int | None = None

    suite: ClassVar = "horovod"
    leasts: ClassVar = {"train_steps": 2, "warm_saves": 0, "lead_steps": 1, "state_bytes": 2**20}
    trial: ClassVar = {
        "state_bytes": 2 * 2**20,
        "rounds": 2,
        "intervals": (1, 2),
        "train_steps": 4,
        "lead_steps": 4,
    }

    def window(self, every: int) -> Window:
        """The window with a save every so many iterations."""
        steps = align_up(self.train_steps, every)
        return Window(every, self.lead_steps, steps, self.warm_saves)


def measure(run: Run[HorovodSettings]) -> None:
    """Everything that the settings ask for.

    Raises:
        ConfigError: there is no room for the run, or Horovod is not installed, or does not start here.
    """
    settings = run.settings
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * _DISK_STATES,
        memory_bytes=RANKS * (settings.state_bytes * _MEMORY_STATES + _PROCESS_BYTES),
    )
    if find_spec("horovod") is None:
        raise ConfigError(f"the suite horovod cannot run: Horovod is not installed; {INSTALL}")
    with Crew(run, Pair, shared=True) as crew:
        enter(run, crew)
        _check(run, crew)
        for _ in crew.rounds("training"):
            for every in crew.shuffled(settings.intervals):
                window = settings.window(every)
                told = {"window": dataclasses.asdict(window), **_arguments(settings)}
                _note(run.report, window, crew.ask_each("train", **told))
    rows = {name: frequencies(run.report, name) for name in run.report.entrants if name in SAVING}
    ways = {name: [dataclasses.asdict(row) for row in rows[name]] for name in rows}
    run.report.more["frequency"] = {"bound": BOUND, "ways": ways}


def enter(run: Run[HorovodSettings], crew: Crew) -> None:
    """Launch the ranks and enter all ways.

    Raises:
        ConfigError: Horovod does not start here, or does not import.
    """
    run.notify("starting")
    try:
        pair = crew.team(BASE)
    except ContenderFailed as exc:
        raise ConfigError(f"the suite horovod cannot run: {exc}") from exc
    assert isinstance(pair, Pair)
    for hello in pair.joined:
        if hello["reason"] is not None:
            raise ConfigError(f"the suite horovod cannot run: {hello['reason']}")
    crew.enter_ways(WAYS, always=BASES, version=pair.joined[0]["version"])


def _check(run: Run[HorovodSettings], crew: Crew) -> None:
    """What each way saves is what training had; this also warms it up."""
    for name in crew.names(reference=False):
        run.notify(f"check: {name}")
        answers = crew.ask(name, "check", **_arguments(run.settings))
        if answers is not None:
            entrant = run.report.entrants[name]
            digests = {digest for a in answers for digest in (a["live"], a["saved"])}
            entrant.restored = len(digests) == 1
            entrant.digest = answers[0]["saved"]
            if name != TORCH_SAVE:
                run.report.tell_bound(name)


def _arguments(settings: HorovodSettings) -> dict[str, Any]:
    return {
        "size": dataclasses.asdict(model_of(settings.state_bytes)),
        "staging_bytes": settings.staging_bytes,
        "timeout_s": settings.timeout_s,
    }


def _note(report: Report, window: Window, windows: dict[str, Answers]) -> None:
    """One round of one interval."""
    seconds = {name: max(a["iteration_s"] for a in windows[name]) for name in windows}
    worked_s = {name: sum(a["processor_s"] for a in windows[name]) for name in windows}
    for name, answers in windows.items():
        report.add(ITERATION(window.every), name, seconds[name])
        if name in SAVING:
            for base in [base for base in BASES if base in seconds]:
                over = seconds[name] / seconds[base] - 1
                report.add(overhead(window.every, base), name, over)
            _note_saves(report, window, name, answers)
            if NO_SPIN in windows:
                saved = window.timed_saves * answers[0]["state_bytes"]
                value = per_gb(worked_s[name] - worked_s[NO_SPIN], saved)
                report.add(TRAIN_PROCESSOR(window.every), name, value)
        report.note_size(answers[0])


def _note_saves(report: Report, window: Window, name: str, answers: Answers) -> None:
    stalls = [answer["stalled_s"] for answer in answers if answer["stalled_s"] is not None]
    if stalls:
        report.add(TRAIN_STALL(window.every), name, max(stalls) / window.timed_saves)
    else:
        report.entrants[name].remark(_IN_STEP_STALL)
    for answer in answers:
        for text in answer["remarks"]:
            report.entrants[name].remark(text)
    if any(answer["written_bytes"] for answer in answers):  # in memory nothing is counted
        for rank, answer in enumerate(answers):
            saved_bytes = window.saves * answer["state_bytes"]
            report.add(WRITTEN(rank), name, answer["written_bytes"] / saved_bytes)


def _frequencies(report: Report) -> Iterator[Table]:
    """LightCheck's Table I: how often each way can save."""
    found = report.more["frequency"]
    for base in BASES:
        title = f"Shortest interval with less than {found['bound']:.0%} overhead over {WAYS[base].title}"
        table = Table(title=title)
        table.add_column("way")
        for column in ("measured", "predicted", "cost of a save, ms"):
            table.add_column(column, justify="right")
        for name, rows in found["ways"].items():
            for row in rows:
                if row["base"] == base:
                    title = report.title(name)
                    table.add_row(title, *_cells(row), style="bold" if name == OURS else None)
        yield table


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    measured = f"> {row['longest']}" if row["measured"] is None else str(row["measured"])
    return measured, str(row["predicted"]), f"{row['save_s'] * 1e3:.1f}"


def _overheads(base: str) -> Over:
    title, bound = f"Overhead over {WAYS[base].title}", BOUND * 100
    return Over(title=title, make=partial(overhead, base=base), mark=bound)


_FIGURES: tuple[View, ...] = (
    Over(title="Iteration", make=ITERATION),
    _overheads(BASE),
    _overheads(NO_SPIN),
    Over(title="Stall of a save on the slower rank", make=TRAIN_STALL),
    Over(
        title=f"Processor time of saves, over {WAYS[NO_SPIN].title}", make=TRAIN_PROCESSOR, drawn=""
    ),
    Several(
        "Bytes written for a save / state bytes",
        [(f"rank {rank}", WRITTEN(rank)) for rank in range(RANKS)],
    ),
    Own(_frequencies),
)

SUITE = Suite(
    settings=HorovodSettings,
    schedule=measure,
    figures=lambda report: _FIGURES,
    fields=lambda settings: {"leaves": 0, "ranks": RANKS},
)
