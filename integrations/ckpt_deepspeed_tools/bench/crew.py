"""The pairs of ranks of all ways; one that fails is out for that stage of ZeRO, and new for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt_core.bench import proc
from ckpt_core.bench.processes import Turns
from ckpt_core.bench.remote import Answers, ContenderFailed
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.errors import ConfigError
from ckpt_deepspeed_tools.bench.settings import RANKS, DeepSpeedSettings
from ckpt_deepspeed_tools.bench.team import DeepSpeedTeam
from ckpt_deepspeed_tools.bench.ways import BASE, INSTALL, NAMES, OWN, WAYS

CANNOT_RUN, CANNOT_LOAD = "cannot_run", "cannot_load"
"""Sections of the report: way -> stage of ZeRO -> its own error."""


class DeepSpeedCrew(Turns):
    """Who runs at one stage of ZeRO after the other. Close it, or use it in a `with` block."""

    def __init__(
        self,
        settings: DeepSpeedSettings,
        root: Path,
        report: Report,
        notify: Callable[[str], None],
    ) -> None:
        """Enter all ways; no process yet."""
        super().__init__(report, notify, seed=settings.seed, rounds=settings.rounds)
        self._settings = settings
        self._root = root
        self._teams: dict[str, DeepSpeedTeam] = {}
        self._launches = 0
        self._tried: set[str] = set()
        self._stage = 0
        self._names = [n for n in NAMES if n == BASE or n in settings.contenders]
        self._out: set[str] = set()
        report.more |= {CANNOT_RUN: {}, CANNOT_LOAD: {}}
        for name in self._names:
            way = WAYS[name]
            report.entrants[name] = Entrant("", way.fsyncs, way.settings, name == BASE)

    @contextmanager
    def stage(self, stage: int) -> Iterator[None]:
        """All ways have a try at this stage of ZeRO; at the end their memory is given back."""
        self._stage = stage
        self._out.clear()
        self._tried.clear()
        yield
        for name in self.names():
            self.ask(name, "drop")

    def names(self) -> list[str]:
        """Ways that run at this stage, in the order of the report."""
        return [name for name in self._names if name not in self._out]

    def passed(self, name: str) -> None:
        """Its try is over: what goes wrong from now on is a failure."""
        self._tried.add(name)

    def start(self, name: str) -> bool:
        """Two ranks for a way, unless it has them already; whether it can run.

        Raises:
            ConfigError: DeepSpeed or the integration does not import.
        """
        if name in self._teams:
            return True
        self._launches += 1
        folder = self._root / f"{self._launches}-{name}"
        folder.mkdir()
        try:
            team = DeepSpeedTeam(folder, RANKS, timeout_s=self._settings.timeout_s)
        except ContenderFailed as exc:
            self._give_up(name, str(exc))
            return False
        self._teams[name] = team
        told = team.joined[0]
        if told["reason"] is not None:
            raise ConfigError(f"the suite deepspeed cannot run: {told['reason']}")
        self.report.entrants[name].version = told["version"]
        return True

    def pids(self, name: str) -> list[int]:
        """Processes of a way that runs, in rank order."""
        return self._teams[name].pids

    def ask(self, name: str, operation: str, /, **arguments: Any) -> Answers | None:
        """Answers of both ranks, or None when the way failed, now or before; then it is out.

        Each answer has `written_bytes`, what storage has seen meanwhile of the rank and its children.
        """
        if name in self._out or name not in self._teams:
            return None
        team = self._teams[name]
        before = [proc.io_bytes(pid) for pid in team.pids]
        try:
            answers = team.ask(operation, **arguments)
        except ContenderFailed as exc:
            self._give_up(name, str(exc))
            return None
        for answer, pid, earlier in zip(answers, team.pids, before, strict=True):
            answer["written_bytes"] = proc.io_bytes(pid).since(earlier).written
        return answers

    def _give_up(self, name: str, error: str) -> None:
        text = f"ZeRO {self._stage}: {error}"
        self.notify(text)
        self._out.add(name)
        team = self._teams.pop(name, None)
        if team is not None:
            team.kill()
        if name == BASE:
            raise ConfigError(f"the suite deepspeed cannot run: {text}")
        entrant = self.report.entrants[name]
        if name in OWN or name in self._tried:
            entrant.fail(text)
        else:
            self.report.more[CANNOT_RUN].setdefault(name, {})[str(self._stage)] = error
            entrant.notes.append(f"cannot run at ZeRO {self._stage}")

    def close(self) -> None:
        """End every process; idempotent."""
        while self._teams:
            self._teams.popitem()[1].close()


def check_installed() -> None:
    """Raise ConfigError, with how to install it, where DeepSpeed is missing; imports nothing of it."""
    for package in ("deepspeed", "ckpt_deepspeed"):
        if find_spec(package) is None:
            raise ConfigError(
                f"the suite deepspeed cannot run: {package} is not installed: {INSTALL}"
            )
