"""The suite `ranks`: the order of a run: teams, then planning, then messages."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import check_room, work_folder
from ckpt_core.bench.ranks import messages, planning
from ckpt_core.bench.ranks.figures import (
    BLOCKED,
    COMMIT,
    DURABLE,
    SHARE,
    WRITTEN,
    figures,
    processor,
    slowdown,
    stall,
)
from ckpt_core.bench.ranks.settings import NAMES, RankMeasure, RankSettings
from ckpt_core.bench.ranks.ways.base import MEMORY
from ckpt_core.bench.remote import Answers
from ckpt_core.bench.results import per_gb
from ckpt_core.bench.run import Run
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.team import RANKS_ENVIRONMENT, Launcher
from ckpt_core.units import align_up

_SHM = Path("/dev/shm")
_PROCESS_BYTES = 400 * 2**20
_MEMORY_STATES = 6
"""Of each rank, in sizes of the state: itself, two of staging memory of `replicated`, one each of the
other ways, and dirty pages."""

_DISK_STATES = 4
"""Of each rank: the roots of `replicated`, whose files are recycled; the other ways share theirs."""


def measure(run: Run[RankSettings]) -> None:
    """Everything that the settings ask for.

    Raises:
        ConfigError: there is no room for the run.
        CkptError: planning or the real commits failed.
    """
    settings, more = run.settings, run.report.more
    if {RankMeasure.SAVE, RankMeasure.TRAIN} & set(settings.measures):
        _teams(run)
    if RankMeasure.PLAN in settings.measures:
        run.notify("planning")
        more["planning"] = planning.measure(settings.plan_leaves, settings.plan_ranks)
    if RankMeasure.MESSAGES in settings.measures:
        more["messages"] = messages.run(settings, run.notify)


def _teams(run: Run[RankSettings]) -> None:
    settings, most = run.settings, max(run.settings.world_sizes)
    state_bytes = max(settings.state_bytes, settings.model.state_bytes)
    check_room(
        settings.root,
        disk_bytes=state_bytes * _DISK_STATES * (most + len(NAMES)),
        memory_bytes=most * (state_bytes * _MEMORY_STATES + _PROCESS_BYTES),
    )
    for ranks in settings.world_sizes:
        folder = run.folder / f"{ranks}-ranks"
        folder.mkdir()
        with _memory(folder), RankCrew(dataclasses.replace(run, folder=folder), ranks) as crew:
            crew.measure()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _memory(folder: Path) -> Iterator[None]:
    """A directory in memory, for the way that begins there."""
    if not _SHM.is_dir():
        yield
        return
    with work_folder(_SHM) as memory:
        (folder / MEMORY).symlink_to(memory)
        yield


@dataclass(frozen=True, slots=True)
class _Step:
    """A training step: of the slowest rank in seconds, of all together in processor time."""

    seconds: float
    processor_s: float

    @classmethod
    def of(cls, answers: Answers) -> _Step:
        """As the ranks have told."""
        return cls(
            max(answer["step_s"] for answer in answers),
            sum(answer["processor_s"] for answer in answers),
        )

    def and_(self, other: _Step) -> _Step:
        """The mean of both."""
        return _Step(
            statistics.mean([self.seconds, other.seconds]),
            statistics.mean([self.processor_s, other.processor_s]),
        )


class RankCrew(Crew):
    """All that is measured with one number of ranks: all ways take turns in one team.

    A way that fails takes its team along, since the ranks wait for each other: the rest goes on in a
    new one.
    """

    def __init__(self, run: Run[RankSettings], ranks: int) -> None:
        launch = Launcher(
            worker="ckpt_core.bench.ranks.worker:RankWorker",
            ranks=ranks,
            environment=RANKS_ENVIRONMENT,
        )
        super().__init__(run, launch, shared=True)
        self.settings = run.settings
        self._ranks = ranks
        self._workload: tuple[str, dict[str, Any]] = ("", {})
        self._state_bytes = 0
        self.report.more.setdefault("rank_bytes", {})
        self.report.more.setdefault("base_step_s", {})
        self.enter(name for name in NAMES if name in self.settings.contenders)

    def measure(self) -> None:
        """Everything that the settings ask of a team."""
        if RankMeasure.SAVE in self.settings.measures:
            size = {"state_bytes": self.settings.state_bytes, "leaves": self.settings.leaves}
            self._set_up("large", size)
            self._saves()
        if RankMeasure.TRAIN in self.settings.measures:
            self._set_up("training", dataclasses.asdict(self.settings.model))
            self._training()

    # -- saves -----------------------------------------------------------------------------------

    def _saves(self) -> None:
        for name in self.turns(f"{self._ranks} ranks, save"):
            self._save_turn(name)
        for name in self.names():
            self.notify(f"{self._ranks} ranks, check: {name}")
            for answer in self.ask(name, "check") or ():
                self.report.entrants[name].compare(answer["saved"], answer["restored"])

    def _save_turn(self, name: str) -> None:
        answers = self.ask(name, "save")
        if answers is None:
            return
        report, ranks = self.report, self._ranks
        written = [answer["written_bytes"] for answer in answers]
        if any(written):  # a filesystem in memory counts nothing
            report.add(WRITTEN(ranks), name, max(written))
        files = [answer["file_bytes"] for answer in answers]
        report.more["rank_bytes"].setdefault(str(ranks), {})[name] = files
        report.add(SHARE(ranks), name, max(files) / self._state_bytes)
        durable_s = max(answer["durable_s"] for answer in answers)
        report.add(DURABLE(ranks), name, durable_s)
        report.add(BLOCKED(ranks), name, max(a["call_s"] + a["barrier_s"] for a in answers))
        known = [a["persisted_s"] for a in answers if a["persisted_s"] is not None]
        if known:
            report.add(COMMIT(ranks), name, max(durable_s - max(known), 0.0))
        self._tidy(name)

    # -- training --------------------------------------------------------------------------------

    def _training(self) -> None:
        before = self._base_step()
        for name in self.turns(f"{self._ranks} ranks, training"):
            windows = {
                every: self._window(name, every) for every in self.shuffled(self.settings.intervals)
            }
            after = self._base_step()
            for every, answers in windows.items():
                if answers is not None and before and after:
                    self._note(name, every, before.and_(after), answers)
            before = after

    def _window(self, name: str, every: int) -> Answers | None:
        steps = max(2, align_up(self.settings.train_steps, every))
        answers = self.ask(name, "train", every=every, steps=steps)
        self._tidy(name)
        return answers

    def _note(self, name: str, every: int, base: _Step, answers: Answers) -> None:
        step = _Step.of(answers)
        self.report.add(slowdown(every)(self._ranks), name, step.seconds / base.seconds)
        worked_s = (step.processor_s - base.processor_s) * every
        value = per_gb(worked_s, answers[0]["state_bytes"])
        self.report.add(processor(every)(self._ranks), name, value)
        for stalls in zip(*[answer["stalls_s"] for answer in answers], strict=True):
            self.report.add(stall(every)(self._ranks), name, max(stalls))

    def _base_step(self) -> _Step | None:
        """A step without saves; those before and after a way's turn are its measure."""
        for name in self.names()[:1]:
            answers = self.ask(name, "train", every=0, steps=self.settings.train_steps)
            if answers is not None:
                step = _Step.of(answers)
                steps = self.report.more["base_step_s"].setdefault(str(self._ranks), [])
                steps.append(step.seconds)
                return step
        return None

    # -- the team --------------------------------------------------------------------------------

    def _set_up(self, workload: str, size: dict[str, Any]) -> None:
        """A team with the state of a workload, and every way warm that works."""
        self._workload = (workload, size)
        self.readmit()
        self._renew()

    def _renew(self) -> None:
        workload, size = self._workload
        fresh = not self.running
        team = self.team("")
        if fresh:
            self._introduce(team.ask("hello", names=self.names())[0])
        team.ask("drop")
        built = team.ask("build", workload=workload, **size)
        self._state_bytes = built[0]["state_bytes"]
        for name in self.names():
            self._warm_up(name)
            if self.team("") is not team:
                return  # it has failed: the others are warm in another team

    def _introduce(self, hellos: dict[str, Any]) -> None:
        for name in self.names():
            entrant = self.report.entrants[name]
            entrant.introduce(hellos[name])
            entrant.remark(hellos[name]["stands_for"])
            if hellos[name]["reason"] is not None:
                self.leave_out(name)

    def _warm_up(self, name: str) -> None:
        self.notify(f"{self._ranks} ranks, {self._workload[0]}, warm-up: {name}")
        settings = self.settings
        bounds = {"staging_bytes": settings.staging_bytes, "timeout_s": settings.timeout_s}
        self.ask(name, "open", folder=self._workload[0], **bounds)
        for _ in range(settings.warmups):
            self.ask(name, "save")
        self.ask(name, "tidy")

    def _tidy(self, name: str) -> None:
        answer = self.ask_one(name, "tidy")
        if answer is not None:
            self.report.entrants[name].settings = answer["settings"]

    def give_up(self, name: str, reason: str) -> None:
        """The way is out, and the others are warm in a new team."""
        super().give_up(name, f"{self._ranks} ranks: {reason}")
        self._renew()


SUITE = Suite(settings=RankSettings, schedule=measure, figures=figures)
