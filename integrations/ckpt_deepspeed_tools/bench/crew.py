"""The pairs of ranks of all ways; one that fails is out for that stage of ZeRO, and new for the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckpt_core.bench.crew import Crew
from ckpt_core.bench.meeting import HOST
from ckpt_core.bench.remote import ContenderFailed
from ckpt_core.bench.run import Run
from ckpt_core.bench.team import RANKS_ENVIRONMENT, Launcher, Ranks
from ckpt_core.errors import ConfigError
from ckpt_deepspeed_tools.bench.ways import BASE, OWN, RANKS, WAYS

CANNOT_RUN, CANNOT_LOAD = "cannot_run", "cannot_load"
"""Sections of the report: way -> stage of ZeRO -> its own error."""


def free_shared_memory(port: int) -> None:
    """DeepSpeed's all-reduce leaves 66 MiB for each rank of the job at that port, however that has ended."""
    for path in Path("/dev/shm").glob(f"deepspeed_*_{HOST}_{port}_*"):
        path.unlink(missing_ok=True)


class DeepSpeedRanks(Ranks):
    """Running ranks, each the leader of a process group, and whatever processes DeepSpeed starts for them."""

    port = 0

    def kill(self) -> None:
        """End both ranks and their child processes, those whose rank has died among them; idempotent."""
        for pid in self.pids:
            # Before a rank is waited for: until then its number means its group alone.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        super().kill()
        free_shared_memory(self.port)


LAUNCH = Launcher(
    worker="ckpt_deepspeed_tools.bench.worker:DeepSpeedWorker",
    ranks=RANKS,
    environment={**RANKS_ENVIRONMENT, "DS_ACCELERATOR": "cpu"},
    team=DeepSpeedRanks,
)


class StageCrew(Crew):
    """Who runs at one stage of ZeRO after the other. Close it, or use it in a `with` block."""

    def __init__(self, run: Run[Any]) -> None:
        """Enter all ways; no process yet."""
        super().__init__(run, LAUNCH)
        self._stage = 0
        self._tried: set[str] = set()
        self.report.more |= {CANNOT_RUN: {}, CANNOT_LOAD: {}}
        self.enter_ways(WAYS, always=(BASE,))

    @contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """All ways have a try at this stage of ZeRO; at the end their memory is given back."""
        self._stage = stage
        self._out.clear()
        self._tried.clear()
        yield
        for name in self.names():
            if name in self._teams:  # a request would launch the others
                self.ask(name, "drop")

    def joined(self, name: str) -> bool:
        """Two ranks for a way, unless it has them already; whether it can run.

        Raises:
            ConfigError: DeepSpeed or the integration does not import.
        """
        try:
            team = self.team(name)
        except ContenderFailed as exc:
            self.give_up(name, str(exc))
            return False
        assert isinstance(team, Ranks)
        told = team.joined[0]
        if told["reason"] is not None:
            raise ConfigError(f"the suite deepspeed cannot run: {told['reason']}")
        self.report.entrants[name].version = told["version"]
        return True

    def passed(self, name: str) -> None:
        """Its try is over: what goes wrong from now on is a failure."""
        self._tried.add(name)

    def give_up(self, name: str, reason: str) -> None:
        """A peer that does not pass its try cannot run here; ours, and one that has passed, fail.

        Raises:
            ConfigError: it is the base, without which nothing can be compared.
        """
        text = f"ZeRO {self._stage}: {reason}"
        if name in OWN or name in self._tried:
            super().give_up(name, text)
        else:
            self.notify(text)
            self._out.add(name)
            self.disband(name)
            self.report.more[CANNOT_RUN].setdefault(name, {})[str(self._stage)] = reason
            self.report.entrants[name].notes.append(f"cannot run at ZeRO {self._stage}")
        if name == BASE:
            raise ConfigError(f"the suite deepspeed cannot run: {text}")
