"""The processes of all ways; one that fails sits out until the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt_core.bench.lightning.settings import LightningSettings
from ckpt_core.bench.lightning.ways import BASE, NAMES
from ckpt_core.bench.remote import ContenderFailed, Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.errors import ConfigError

_MODULE = "ckpt_core.bench.lightning.worker"


class FitCrew:
    """Running processes. Close it, or use it in a `with` block."""

    def __init__(
        self,
        settings: LightningSettings,
        root: Path,
        report: Report,
        notify: Callable[[str], None],
    ) -> None:
        """Start them, and leave out those that cannot run here.

        Raises:
            ConfigError: Lightning is missing, so that nothing can be compared.
        """
        self.report = report
        self.notify = notify
        self._rounds = settings.rounds
        self._random = random.Random(settings.seed)
        self._remotes: dict[str, Remote] = {}
        try:
            for name in NAMES:
                if name == BASE or name in settings.contenders:
                    self._start(name, root, settings)
            notify("starting")
            for name in list(self._remotes):
                self._introduce(name)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, root: Path, settings: LightningSettings) -> None:
        threads = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
        self.report.entrants[name] = Entrant()
        (root / name).mkdir()
        self._remotes[name] = Remote(
            name, root / name, timeout_s=settings.timeout_s, module=_MODULE, environment=threads
        )

    def _introduce(self, name: str) -> None:
        hello = self.ask(name, "hello")
        if hello is None:
            return
        entrant = self.report.entrants[name]
        entrant.version, entrant.fsyncs = hello["version"], hello["fsyncs"]
        entrant.settings, entrant.reason = hello["settings"], hello["reason"]
        entrant.reference = name == BASE
        if entrant.reason is not None:
            self._remotes.pop(name).close()
            if name == BASE:
                raise ConfigError(f"the suite lightning cannot run: {entrant.reason}")

    def names(self) -> list[str]:
        """Ways that still run, in the order of the report."""
        return list(self._remotes)

    def rounds(self, title: str) -> Iterator[int]:
        """Numbers of the rounds, told as they begin."""
        for number in range(self._rounds):
            self.notify(f"{title}: round {number + 1} of {self._rounds}")
            yield number

    def shuffled(self, items: list[Any]) -> list[Any]:
        """The same items in the run's own random order."""
        return self._random.sample(items, len(items))

    def ask(self, name: str, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """Answer of a way, or None when it failed; then it is out."""
        remote = self._remotes.get(name)
        if remote is None:
            return None
        try:
            return remote.call(operation, **arguments)
        except ContenderFailed as exc:
            self.notify(str(exc))
            entrant = self.report.entrants[name]
            entrant.reason, entrant.failed = str(exc), True
            self._remotes.pop(name).close()
            return None

    def __enter__(self) -> FitCrew:
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
