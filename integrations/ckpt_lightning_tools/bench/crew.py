"""The processes of all ways; one that fails sits out until the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt_core.bench.processes import Processes
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.errors import ConfigError
from ckpt_lightning_tools.bench.settings import LightningSettings
from ckpt_lightning_tools.bench.ways import BASE, NAMES

_WORKER = "ckpt_lightning_tools.bench.worker:FitWorker"


class FitCrew(Processes):
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
        super().__init__(report, notify, seed=settings.seed, rounds=settings.rounds)
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
            name, root / name, timeout_s=settings.timeout_s, worker=_WORKER, environment=threads
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
