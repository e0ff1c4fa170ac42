"""The measures `peers` and `parity`: nodes as processes, which keep one another's steps in memory."""

from __future__ import annotations

import dataclasses
import os
import secrets
from pathlib import Path
from typing import Any

from ckpt_core.bench.crew import Crew
from ckpt_core.bench.levels.copying import COPIES, SETTINGS, TITLES
from ckpt_core.bench.levels.figures import (
    BACK_RATE,
    CLOCK,
    CLOCK_MEDIAN,
    CODE,
    KEPT_ARRIVED,
    KEPT_CALL,
    KEPT_COMMITTED,
    KEPT_RATE,
    KEPT_SENT,
    LOST_BACK,
    PARITY_MADE,
    SLOWER,
    SLOWER_MEDIAN,
    median_within,
)
from ckpt_core.bench.levels.settings import LM, NODES, PARITY, PEERS, LevelSettings
from ckpt_core.bench.remote import Answers
from ckpt_core.bench.results import Entrant
from ckpt_core.bench.run import Run
from ckpt_core.bench.team import RANKS_ENVIRONMENT, Launcher
from ckpt_core.levels import parity_speed

_SHAPE = "2+1"
_SHAPES = ("4+1", "4+2")
"""Of which the arithmetic is measured."""

_LEAVES = 64
_WARM_UPS = 2
_TOKEN = "CKPT_PEER_TOKEN_FILE"


def launcher(name: str, token: Path) -> Launcher:
    """Of the ranks of a way; they sign with the same token."""
    worker = "LmWorker" if name == LM else "NodeWorker"
    environment = {**RANKS_ENVIRONMENT, _TOKEN: str(token)}
    place = f"{__package__}.node_worker:{worker}"
    return Launcher(worker=place, ranks=NODES[name], environment=environment)


def write_token(folder: Path) -> Path:
    """A token that only this user can read."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


class Nodes:
    """The nodes of one way, on one filesystem.

    Args:
        folder: in memory, for all of them.
    """

    def __init__(self, run: Run[LevelSettings], crew: Crew, folder: Path, name: str) -> None:
        self._run, self._crew, self._name = run, crew, name
        self._shape = _SHAPE if name == PARITY else ""
        self._home = {"home": str(folder / name), "shape": self._shape}

    def ask(self, operation: str, **told: Any) -> Answers | None:
        """All of them."""
        return self._crew.ask(self._name, operation, **told)

    def start(self) -> None:
        """Until the files that saves write to have been written once."""
        self.ask("build", state_bytes=self._run.settings.node_bytes, leaves=_LEAVES)
        self.ask("meet", **self._home)
        for _ in range(_WARM_UPS):
            self.ask("save_and_reach")

    def save(self) -> None:
        """One save; of all nodes the last one counts."""
        report, answers = self._run.report, self.ask("save_and_reach")
        if answers is None:
            return
        latest = {key: max(one[key] for one in answers) for key in answers[0] if key[-2:] == "_s"}
        rate = self._run.settings.node_bytes / (latest["arrived_s"] - latest["committed_s"])
        report.add(KEPT_RATE, self._name, rate)
        if self._shape:
            report.add(PARITY_MADE, self._name, latest["arrived_s"])
            return
        report.add(KEPT_CALL, self._name, latest["call_s"])
        report.add(KEPT_COMMITTED, self._name, latest["committed_s"])
        report.add(KEPT_ARRIVED, self._name, latest["arrived_s"])
        if self._name == PEERS:
            report.add(KEPT_SENT, self._name, answers[0]["sent_bytes"])

    def copy(self) -> None:
        """The bytes of one node by tools that copy files."""
        report = self._run.report
        answers = self.ask("copy", into=self._home["home"], tools=self._crew.shuffled(COPIES))
        for tool, seconds in answers[0]["seconds"].items() if answers is not None else ():
            about = Entrant(tool, "no", SETTINGS[tool], True, title=TITLES[tool])
            if seconds is None:
                about.reason = f"{tool} is not installed"
            else:
                report.add(KEPT_ARRIVED, tool, seconds)
            report.entrants.setdefault(tool, about)

    def lose_one(self) -> None:
        """The last node and its disk; all go on from what is left."""
        saved = self.ask("save_and_reach")
        self.ask("lose", home=self._home["home"], rank=NODES[self._name] - 1)
        back = self.ask("go_on", **self._home)
        if saved is None or back is None:
            return
        seconds = max(one["seconds"] for one in back)
        self._run.report.add(LOST_BACK, self._name, seconds)
        self._run.report.add(BACK_RATE, self._name, self._run.settings.node_bytes / seconds)
        before, after = (" ".join(one["digest"] for one in found) for found in (saved, back))
        self._run.report.entrants[self._name].compare(before, after)

    def beside(self, model: dict[str, Any]) -> None:
        """Training on the first node, while agents send and while they are held; others only save."""
        self.ask("leave")
        self.ask("train_on", model=model)
        self.ask("meet", home=self._home["home"] + "-training", shape=self._shape)
        self.ask("save")
        self.ask("reach")
        settings, cpus = self._run.settings, sorted(os.sched_getaffinity(0))
        asked = {"pairs": settings.pairs, "steps": settings.interval, "others": cpus[1:]}
        for _ in range(settings.rounds):
            answers = self.ask("beside", **asked)
            for key, figure in ("slower", SLOWER), ("clock", CLOCK):
                for value in answers[0][key] if answers is not None else ():
                    self._run.report.add(figure, self._name, value)
        self.ask("leave")


def peers(run: Run[LevelSettings], crew: Crew, folder: Path) -> None:
    """Copies at another node, in turns with other ways; one node lost; training beside copies."""
    groups = _started(run, crew, folder, PEERS, LM)
    for name in crew.turns("peers"):
        if name in groups:
            groups[name].save()
        if name == PEERS:
            groups[name].copy()
    for group in [groups[name] for name in groups if name == PEERS]:
        for _ in crew.rounds("peers, one lost"):
            group.lose_one()
        group.beside(dataclasses.asdict(run.settings.model))
        for figure, told in (SLOWER, SLOWER_MEDIAN), (CLOCK, CLOCK_MEDIAN):
            for value in median_within(run.report.values.get(figure.key, {}).get(PEERS, ())):
                run.report.add(told, PEERS, value)


def parity(run: Run[LevelSettings], crew: Crew, folder: Path) -> None:
    """Parity of the nodes' steps; one node lost, which comes back from it."""
    for group in _started(run, crew, folder, PARITY).values():
        for _ in crew.rounds("parity"):
            group.save()
        for _ in crew.rounds("parity, one lost"):
            group.lose_one()
        group.ask("leave")
    for shape in _SHAPES:
        by, _ = parity_speed(shape)
        about = Entrant("parity", settings="pieces of 1 MiB in memory that is used again")
        about.title = f"{shape} by {by}"
        run.report.entrants.setdefault(shape, about)
    for _ in crew.rounds("parity, arithmetic"):
        for shape in crew.shuffled(_SHAPES):
            run.report.add(CODE, shape, parity_speed(shape)[1])


def _started(run: Run[LevelSettings], crew: Crew, folder: Path, *names: str) -> dict[str, Nodes]:
    found = {name: Nodes(run, crew, folder, name) for name in crew.names() if name in names}
    for group in found.values():
        group.start()
    return found
