"""The pair of ranks throughout a run: a way that fails takes it along, the rest goes on in a new one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt_core.bench import proc
from ckpt_core.bench.processes import Turns
from ckpt_core.bench.remote import Answers, ContenderFailed
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.errors import ConfigError
from ckpt_horovod_tools.bench.pair import Pair
from ckpt_horovod_tools.bench.settings import HorovodSettings
from ckpt_horovod_tools.bench.ways import BASES, INSTALL, NAMES, WAYS


class PairRun(Turns):
    """The ways that still run, and who runs them. Close it, or use it in a `with` block."""

    def __init__(
        self,
        settings: HorovodSettings,
        root: Path,
        report: Report,
        notify: Callable[[str], None],
    ) -> None:
        """Launch the ranks and enter all ways.

        Raises:
            ConfigError: Horovod is missing, or does not start here.
        """
        super().__init__(report, notify, seed=settings.seed, rounds=settings.rounds)
        self._settings = settings
        self._root = root
        self._pair: Pair | None = None
        self._pairs = 0
        self._names = [n for n in NAMES if n in BASES or n in settings.contenders]
        check_installed()
        version = self._start()
        for name in self._names:
            way = WAYS[name]
            report.entrants[name] = Entrant(version, way.fsyncs, way.settings, name in BASES)

    def _start(self) -> str:
        """A new pair; the release of Horovod."""
        self.notify("starting")
        self._pairs += 1
        folder = self._root / f"pair-{self._pairs}"
        folder.mkdir()
        try:
            self._pair = Pair(folder, timeout_s=self._settings.timeout_s)
            hellos = self._pair.ask("hello")
        except ContenderFailed as exc:
            self._kill()
            raise ConfigError(f"the suite horovod cannot run: {exc}") from exc
        reasons = [hello["reason"] for hello in hellos if hello["reason"] is not None]
        if reasons:
            self._kill()
            raise ConfigError(f"the suite horovod cannot run: {reasons[0]}")
        version: str = hellos[0]["version"]
        return version

    def names(self) -> list[str]:
        """Ways that still run, in the order of the report."""
        return list(self._names)

    def ask(self, name: str, operation: str, **arguments: Any) -> Answers | None:
        """Answers of both ranks, or None when the way failed, now or before; then it is out.

        Each answer has `written_bytes`, what storage has seen of the rank meanwhile.
        """
        if name not in self._names:
            return None
        if self._pair is None:
            self._start()
        assert self._pair is not None
        before = [proc.io_bytes(pid) for pid in self._pair.pids]
        try:
            answers = self._pair.ask(operation, name=name, **arguments)
        except ContenderFailed as exc:
            self._give_up(name, exc)
            return None
        for answer, pid, earlier in zip(answers, self._pair.pids, before, strict=True):
            answer["written_bytes"] = proc.io_bytes(pid).since(earlier).written
        return answers

    def _give_up(self, name: str, error: ContenderFailed) -> None:
        self.notify(str(error))
        self.report.entrants[name].fail(str(error))
        self._names.remove(name)
        self._kill()

    def _kill(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.kill()

    def close(self) -> None:
        """Let the ranks end; idempotent."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()


def check_installed() -> None:
    """Raise ConfigError, with how to install it, where Horovod is missing; imports nothing of it."""
    if find_spec("horovod") is None:
        raise ConfigError(f"the suite horovod cannot run: Horovod is not installed; {INSTALL}")
