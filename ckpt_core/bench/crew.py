"""All contenders of a run, each in its process; who fails sits out until the next workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_core.bench.contenders import NAMES
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.processes import Processes
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.bench.settings import Measure, Settings

_PROCESS_BYTES = 300 * 2**20
_SPARE_STATES = 4
"""Memory that must stay free, in sizes of the state: for the copies of the contender whose turn it is,
and for the page cache, whose share of dirty pages would else throttle the buffered ones."""


class Crew(Processes):
    """The processes of one run. Close it, or use it in a `with` block."""

    def __init__(
        self, settings: Settings, root: Path, report: Report, notify: Callable[[str], None]
    ) -> None:
        """Start every process and leave out those that cannot run here.

        Raises:
            ConfigError: there is no room for the run; nothing was written.
        """
        super().__init__(report, notify, seed=settings.seed, rounds=settings.rounds)
        self.settings = settings
        self._root = root
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        settings = self.settings
        for name in [name for name in NAMES if name in settings.contenders]:
            self.report.entrants[name] = Entrant()
            (self._root / name).mkdir()
            self._remotes[name] = self._remote(name)
        self.notify("starting")
        hellos = {name: self.ask(name, "hello") for name in list(self._remotes)}
        disk_bytes, memory_bytes = 0, settings.state_bytes * _SPARE_STATES
        for name, hello in hellos.items():
            if hello is None:
                continue
            self._introduce(name, hello)
            disk_bytes += settings.state_bytes * hello["disk_states"]
            memory_bytes += settings.state_bytes * hello["memory_states"] + _PROCESS_BYTES
        if Measure.TRAIN in settings.measures:
            disk_bytes += settings.model.state_bytes * (settings.train_steps + 4)
        check_room(settings.root, disk_bytes=disk_bytes, memory_bytes=memory_bytes)

    def _introduce(self, name: str, hello: dict[str, Any]) -> None:
        entrant = self.report.entrants[name]
        entrant.version, entrant.fsyncs = hello["version"], hello["fsyncs"]
        entrant.reference, entrant.reason = hello["reference"], hello["reason"]
        if entrant.reason is not None:
            self._remotes.pop(name).close()

    def next_workload(self) -> None:
        """Start those again that failed in the workload before; a few fail at one kind of state only."""
        for name, entrant in self.report.entrants.items():
            if entrant.failed and entrant.version and name not in self._remotes:
                self._remotes[name] = self._remote(name)

    def _remote(self, name: str) -> Remote:
        return Remote(name, self._root / name, timeout_s=self.settings.timeout_s)

    def names(self, *, reference: bool = True) -> list[str]:
        """Contenders that still run, in the order of the report."""
        entrants = self.report.entrants
        return [name for name in self._remotes if reference or not entrants[name].reference]

    def turns(self, title: str, *, reference: bool = True) -> Iterator[str]:
        """One contender after the other: `rounds` rounds, each in a random order of its own."""
        for _ in self.rounds(title):
            names = self.names(reference=reference)
            self._random.shuffle(names)
            for name in names:
                if name in self._remotes:
                    yield name

    def pid(self, name: str) -> int:
        """Process of a contender that runs."""
        return self._remotes[name].pid

    def folder(self, name: str) -> Path:
        """Directory of a contender that runs."""
        return self._remotes[name].root
