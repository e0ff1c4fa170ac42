"""All ways of a run and the teams that serve them; who fails is out, and the others go on."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ckpt_core.bench.closing import Closing
from ckpt_core.bench.remote import Answers, ContenderFailed
from ckpt_core.bench.results import Entrant, Setup
from ckpt_core.bench.run import Run
from ckpt_core.bench.team import Launch, Team
from ckpt_core.errors import ConfigError

_ALL = "all"
Item = TypeVar("Item")


class Crew(Closing):
    """The teams of one run, launched when they are asked first. Close it, or use it in a `with` block.

    Call order: `enter`, perhaps `start` -> `ask` in the `turns` of each title -> `close`.

    Attributes:
        run: what is measured, and where it is noted.
        report: of the run.
        notify: of the run.
    """

    def __init__(self, run: Run[Any], launch: Launch, *, shared: bool = False) -> None:
        """With no process yet.

        Args:
            run: see there.
            launch: starts a team.
            shared: one team serves all ways, and is told the `name` of the way in each request; else each
                way has a team of its own.
        """
        self.run = run
        self.report, self.notify = run.report, run.notify
        self._random = random.Random(run.settings.seed)
        self._launch = launch
        self._shared = shared
        self._teams: dict[str, Team] = {}
        self._names: list[str] = []
        self._out: set[str] = set()
        self._launches = 0

    # -- ways ------------------------------------------------------------------------------------

    def enter(self, ways: Iterable[str], *, about: dict[str, Entrant] | None = None) -> None:
        """List ways in the order of the report, with what is known `about` them."""
        for name in ways:
            self._names.append(name)
            self.report.entrants.setdefault(name, (about or {}).get(name) or Entrant())

    def enter_ways(
        self, ways: Mapping[str, Setup], *, always: Collection[str], version: str = ""
    ) -> None:
        """List those of a table that the settings choose, and those that `always` run, as references.

        Args:
            ways: in the order of the report.
            always: names of those that others are compared with.
            version: of all, where that is known already.
        """
        for name, way in ways.items():
            if name in always or name in self.run.settings.contenders:
                entrant = Entrant(version, way.fsyncs, way.settings, name in always)
                entrant.title = way.title
                self.enter([name], about={name: entrant})

    def names(self, *, reference: bool = True) -> list[str]:
        """Ways that still run, in the order of the report."""
        entrants = self.report.entrants
        running = [name for name in self._names if name not in self._out]
        return [name for name in running if reference or not entrants[name].reference]

    def start(self, *, base: str | None = None) -> dict[str, dict[str, Any]]:
        """Launch all side by side and let them introduce themselves; who cannot run here is out.

        Args:
            base: the way without which nothing can be compared.

        Returns:
            What each said that runs; see `Entrant.introduce`.

        Raises:
            ConfigError: the base cannot run.
        """
        self.notify("starting")
        for name in self.names():
            self.team(name)
        hellos = {name: self.ask_one(name, "hello") for name in self.names()}
        for name, hello in hellos.items():
            if hello is None:
                continue
            entrant = self.report.entrants[name]
            entrant.introduce(hello)
            if entrant.reason is not None:
                self.leave_out(name)
                if name == base:
                    suite = self.run.settings.suite
                    raise ConfigError(f"the suite {suite} cannot run: {entrant.reason}")
        return {name: hello for name in self.names() if (hello := hellos[name]) is not None}

    def leave_out(self, name: str) -> None:
        """From now on; a team of its own is closed."""
        self._out.add(name)
        if not self._shared and name in self._teams:
            self._teams.pop(name).close()

    def readmit(self) -> None:
        """Those that have failed, for another workload: a few fail at one kind of state only."""
        self._out -= {name for name in self._out if self.report.entrants[name].failed}

    # -- teams -----------------------------------------------------------------------------------

    def team(self, name: str) -> Team:
        """The team that serves a way; launched if it is not there.

        Raises:
            ContenderFailed: it could not start.
        """
        seat = _ALL if self._shared else name
        if seat not in self._teams:
            self._launches += 1
            folder = self.run.folder / f"{self._launches}-{seat}"
            folder.mkdir()
            self._teams[seat] = self._launch(seat, folder, self.run.settings.timeout_s)
        return self._teams[seat]

    @property
    def running(self) -> bool:
        """Whether any team is there."""
        return bool(self._teams)

    def ask(self, name: str, operation: str, /, **arguments: Any) -> Answers | None:
        """Answers of all ranks (see `Team.ask`), or None when the way failed, now or before."""
        if name in self._out:
            return None
        told = {"name": name} if self._shared else {}
        try:
            return self.team(name).ask(operation, **told, **arguments)
        except ContenderFailed as exc:
            self.give_up(name, str(exc))
            return None

    def ask_one(self, name: str, operation: str, /, **arguments: Any) -> dict[str, Any] | None:
        """As `ask`: the answer of the first rank, which is the only one of most."""
        answers = self.ask(name, operation, **arguments)
        return None if answers is None else answers[0]

    def ask_each(self, operation: str, /, **arguments: Any) -> dict[str, Answers]:
        """Ask one way after the other, in random order; answers of those that have not failed, by name."""
        order = self.shuffled(self.names())
        asked = {name: self.ask(name, operation, **arguments) for name in order}
        return {name: answers for name, answers in asked.items() if answers is not None}

    def give_up(self, name: str, reason: str) -> None:
        """The way is out, and its team ends: its ranks may wait for each other for ever."""
        self.notify(reason)
        self.report.entrants[name].fail(reason)
        self._out.add(name)
        self.disband(name)

    def disband(self, name: str) -> None:
        """End the team that serves a way, after a failure; the next request launches another one."""
        team = self._teams.pop(_ALL if self._shared else name, None)
        if team is not None:
            team.abandon()

    def close(self) -> None:
        """End every process; idempotent."""
        self._end()

    def break_off(self) -> None:
        """Nobody is asked to finish."""
        self._end(after_an_error=True)

    def _end(self, *, after_an_error: bool = False) -> None:
        for team in self._teams.values():
            team.hang_up()  # they end side by side
        while self._teams:
            team = self._teams.popitem()[1]
            team.abandon() if after_an_error else team.close()

    # -- turns -----------------------------------------------------------------------------------

    def turns(self, title: str, *, reference: bool = True) -> Iterator[str]:
        """One way after the other: `rounds` rounds, each in a random order of its own."""
        for _ in self.rounds(title):
            for name in self.shuffled(self.names(reference=reference)):
                if name not in self._out:
                    yield name

    def rounds(self, title: str) -> Iterator[int]:
        """Numbers of the rounds, told as they begin."""
        for number in range(self.run.settings.rounds):
            self.notify(f"{title}: round {number + 1} of {self.run.settings.rounds}")
            yield number

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The same items in the run's own random order."""
        return self._random.sample(items, len(items))
