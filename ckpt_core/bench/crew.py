"""All contenders of a run, each in its process; who fails sits out until the next workload."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt_core.bench.contenders import NAMES
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.remote import ContenderFailed, Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.bench.settings import Measure, Settings

_PROCESS_BYTES = 300 * 2**20
_SPARE_STATES = 4
"""Memory that must stay free, in sizes of the state: for the copies of the contender whose turn it is,
and for the page cache, whose share of dirty pages would else throttle the buffered ones."""


class Crew:
    """The processes of one run. Close it, or use it in a `with` block."""

    def __init__(
        self, settings: Settings, root: Path, report: Report, notify: Callable[[str], None]
    ) -> None:
        """Start every process and leave out those that cannot run here.

        Raises:
            ConfigError: there is no room for the run; nothing was written.
        """
        self.settings = settings
        self.report = report
        self.notify = notify
        self._random = random.Random(settings.seed)
        self._root = root
        self._remotes: dict[str, Remote] = {}
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
        return [
            name for name in self._remotes if reference or not self.report.entrants[name].reference
        ]

    def turns(self, title: str, *, reference: bool = True) -> Iterator[str]:
        """One contender after the other: `rounds` rounds, each in a random order of its own."""
        for number in range(1, self.settings.rounds + 1):
            self.notify(f"{title}: round {number} of {self.settings.rounds}")
            names = self.names(reference=reference)
            self._random.shuffle(names)
            for name in names:
                if name in self._remotes:
                    yield name

    def shuffled(self, items: list[int]) -> list[int]:
        """The same items in the run's own random order."""
        return self._random.sample(items, len(items))

    def ask(self, name: str, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """Answer of a contender, or None when it failed; then it is out until the next workload."""
        remote = self._remotes.get(name)
        if remote is None:
            return None
        try:
            return remote.call(operation, **arguments)
        except ContenderFailed as exc:
            self.notify(str(exc))
            entrant = self.report.entrants[name]
            entrant.reason = "; ".join(filter(None, [entrant.reason, str(exc)]))
            entrant.failed = True
            self._remotes.pop(name).close()
            return None

    def pid(self, name: str) -> int:
        """Process of a contender that runs."""
        return self._remotes[name].pid

    def folder(self, name: str) -> Path:
        """Directory of a contender that runs."""
        return self._remotes[name].root

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process; idempotent."""
        while self._remotes:
            self._remotes.popitem()[1].close()
