"""Saves and training of one team: all ways take turns in random order, so a drifting disk hits all alike."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_core.bench import proc
from ckpt_core.bench.closing import Closing
from ckpt_core.bench.ranks import figures
from ckpt_core.bench.ranks.settings import RankMeasure, RankSettings
from ckpt_core.bench.ranks.team import Team
from ckpt_core.bench.remote import Answers, ContenderFailed
from ckpt_core.bench.results import Entrant, Report


class TeamRun(Closing):
    """All that is measured with one number of ranks. Close it, or use it in a `with` block.

    A way that fails takes its team along, since the ranks wait for each other: the rest goes on in a
    new one.
    """

    def __init__(
        self, settings: RankSettings, root: Path, ranks: int, notify: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._root = root
        self._ranks = ranks
        self._notify = notify
        self._random = random.Random(settings.seed + ranks)
        self._team: Team | None = None
        self._teams = 0
        self._names: list[str] = []
        self._state_bytes = 0

    def measure(self, report: Report) -> None:
        """Everything that the settings ask of a team."""
        if RankMeasure.SAVE in self._settings.measures:
            self._saves(report)
        if RankMeasure.TRAIN in self._settings.measures:
            self._training(report)

    # -- saves -----------------------------------------------------------------------------------

    def _saves(self, report: Report) -> None:
        size = {"state_bytes": self._settings.state_bytes, "leaves": self._settings.leaves}
        self._set_up(report, "large", size)
        for name in self._turns("save"):
            self._save_turn(report, name)
        for name in list(self._names):
            self._notify(f"{self._ranks} ranks, check: {name}")
            answers = self._ask(report, name, "check")
            if answers is not None:
                equal = all(answer["saved"] == answer["restored"] for answer in answers)
                entrant = report.entrants[name]
                entrant.restored = equal and entrant.restored is not False
                entrant.digest = answers[0]["restored"]

    def _save_turn(self, report: Report, name: str) -> None:
        assert self._team is not None
        before = [proc.io_bytes(pid) for pid in self._team.pids]
        answers = self._ask(report, name, "save")
        if answers is None:
            return
        ranks = self._ranks
        pairs = zip(self._team.pids, before, strict=True)
        written = [proc.io_bytes(pid).since(earlier).written for pid, earlier in pairs]
        if any(written):  # a filesystem in memory counts nothing
            report.add(figures.written(ranks), name, max(written))
        files = [answer["file_bytes"] for answer in answers]
        report.more["rank_bytes"].setdefault(str(ranks), {})[name] = files
        report.add(figures.share(ranks), name, max(files) / self._state_bytes)
        durable_s = max(answer["durable_s"] for answer in answers)
        report.add(figures.durable(ranks), name, durable_s)
        report.add(figures.blocked(ranks), name, max(a["blocked_s"] for a in answers))
        known = [a["persisted_s"] for a in answers if a["persisted_s"] is not None]
        if known:
            report.add(figures.commit(ranks), name, max(durable_s - max(known), 0.0))
        self._tidy(report, name)

    # -- training --------------------------------------------------------------------------------

    def _training(self, report: Report) -> None:
        self._set_up(report, "training", dataclasses.asdict(self._settings.model))
        before_s = self._base_step(report)
        for name in self._turns("training"):
            windows = {
                every: self._window(report, name, every)
                for every in self._random.sample(
                    self._settings.intervals, len(self._settings.intervals)
                )
            }
            after_s = self._base_step(report)
            for every, answers in windows.items():
                if answers is not None and before_s and after_s:
                    base_s = statistics.mean([before_s, after_s])
                    self._note_window(report, name, (every, base_s), answers)
            before_s = after_s

    def _window(self, report: Report, name: str, every: int) -> Answers | None:
        steps = max(2, every * -(-self._settings.train_steps // every))
        answers = self._ask(report, name, "train", every=every, steps=steps)
        self._tidy(report, name)
        return answers

    def _note_window(
        self, report: Report, name: str, window: tuple[int, float], answers: Answers
    ) -> None:
        every, base_s = window
        step_s = max(answer["step_s"] for answer in answers)
        report.add(figures.slowdown(self._ranks, every), name, step_s / base_s)
        for stalls in zip(*[answer["stalls_s"] for answer in answers], strict=True):
            report.add(figures.stall(self._ranks, every), name, max(stalls))

    def _base_step(self, report: Report) -> float | None:
        """Seconds of a step without saves; those before and after a way's turn are its measure."""
        if not self._names:
            return None
        name = self._names[0]
        answers = self._ask(report, name, "train", every=0, steps=self._settings.train_steps)
        if answers is None:
            return None
        step_s: float = max(answer["step_s"] for answer in answers)
        report.more["base_step_s"].setdefault(str(self._ranks), []).append(step_s)
        return step_s

    # -- the team --------------------------------------------------------------------------------

    def _set_up(self, report: Report, workload: str, size: dict[str, Any]) -> None:
        """A team with the state of a workload, and every way warm that works."""
        self._workload, self._size = workload, size
        self._names = list(report.entrants)
        self._renew(report)

    def _renew(self, report: Report) -> None:
        while True:
            name = ""
            try:
                self._start(report)
                for name in list(self._names):
                    self._warm_up(name)
            except ContenderFailed as exc:
                if not name:
                    raise
                self._give_up(report, name, exc)
                continue
            return

    def _start(self, report: Report) -> None:
        if self._team is None:
            self._teams += 1
            folder = self._root / f"{self._ranks}-ranks-{self._teams}"
            folder.mkdir()
            self._notify(f"{self._ranks} ranks: starting")
            self._team = Team(folder, self._ranks, timeout_s=self._settings.timeout_s)
            self._introduce(report)
        self._team.ask("drop")
        built = self._team.ask("build", workload=self._workload, **self._size)
        self._state_bytes = built[0]["state_bytes"]

    def _introduce(self, report: Report) -> None:
        assert self._team is not None
        found = self._team.ask("hello", names=list(report.entrants))[0]
        for name, hello in found.items():
            entrant = report.entrants[name]
            entrant.version, entrant.fsyncs = hello["version"], hello["fsyncs"]
            if hello["stands_for"] not in entrant.notes:
                entrant.notes.append(hello["stands_for"])
            if hello["reason"] is not None:
                entrant.reason = hello["reason"]
                self._names.remove(name)

    def _warm_up(self, name: str) -> None:
        assert self._team is not None
        self._notify(f"{self._ranks} ranks, {self._workload}, warm-up: {name}")
        self._team.ask(
            "open",
            name=name,
            folder=self._workload,
            staging_bytes=self._settings.staging_bytes,
            timeout_s=self._settings.timeout_s,
        )
        for _ in range(self._settings.warmups):
            self._team.ask("save", name=name)
        self._team.ask("tidy", name=name)

    def _turns(self, title: str) -> Iterator[str]:
        for number in range(1, self._settings.rounds + 1):
            self._notify(f"{self._ranks} ranks, {title}: round {number} of {self._settings.rounds}")
            for name in self._random.sample(self._names, len(self._names)):
                if name in self._names:
                    yield name

    def _ask(self, report: Report, name: str, operation: str, **arguments: Any) -> Answers | None:
        """Answers of all ranks, or None when the way failed: then it is out, and the team is new."""
        if name not in self._names:
            return None
        assert self._team is not None
        try:
            return self._team.ask(operation, name=name, **arguments)
        except ContenderFailed as exc:
            self._give_up(report, name, exc)
            self._renew(report)
            return None

    def _tidy(self, report: Report, name: str) -> None:
        answers = self._ask(report, name, "tidy")
        if answers is not None:
            report.entrants[name].settings = answers[0]["settings"]

    def _give_up(self, report: Report, name: str, error: ContenderFailed) -> None:
        text = f"{self._ranks} ranks: {error}"
        self._notify(text)
        report.entrants[name].fail(text)
        self._names.remove(name)
        if self._team is not None:
            self._team.kill()
            self._team = None

    def close(self) -> None:
        """Let the team end; idempotent."""
        if self._team is not None:
            self._team.close()
            self._team = None


def enter_all(report: Report, names: tuple[str, ...]) -> None:
    """List the ways in the order of the report."""
    report.more |= {"rank_bytes": {}, "base_step_s": {}}
    for name in names:
        report.entrants[name] = Entrant()
