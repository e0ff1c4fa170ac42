"""Programs of one or several ranks, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ckpt_core.bench.meeting import free_port
from tests.forks import Forks

HERE = Path(__file__).parents[3]
PROGRAM = "tests.integrations.transformers.program"
LIMIT_S = 240


class Program:
    """The script, by so many ranks."""

    def __init__(self, forks: Forks, name: str = PROGRAM, *, ranks: int = 1, **env: str) -> None:
        self._forks, self._name, self._ranks, self._env = forks, name, ranks, env

    def run(self, *folders: Path, **env: int) -> list[int]:
        """Run it to its end: the exit codes."""
        ranks = self._start(folders, env)
        try:
            return [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            _end(ranks)

    def kill(self, *folders: Path, after: int) -> None:
        """Run it, and kill one rank when so many steps have begun in the last folder, or one or two more."""
        ranks = self._start(folders, {"HOLD_AT": after + 2})
        begun, at = 0, False
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                at = at or line == f"run {folders[-1].name}\n"
                begun += at and line.startswith("step ")
                if begun == after:
                    ranks[-1].kill()
                    break
            assert ranks[-1].wait(LIMIT_S) == -signal.SIGKILL
        finally:
            _end(ranks)

    def _start(self, folders: tuple[Path, ...], env: dict[str, int]) -> list[subprocess.Popen[str]]:
        common = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | self._env
        common |= {name: str(value) for name, value in env.items()}
        if self._ranks > 1:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            common["WORLD_SIZE"] = str(self._ranks)
        started = []
        for rank in map(str, range(self._ranks)):
            mine = {"RANK": rank, "LOCAL_RANK": rank} if self._ranks > 1 else {}
            one = self._forks.popen(
                [sys.executable, "-m", self._name, *folders],
                cwd=HERE,
                env=common | mine,
                stdout=subprocess.PIPE if rank == "0" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            started.append(one)
        return started


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.communicate()
