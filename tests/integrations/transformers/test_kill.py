"""Real processes are killed, alone and as one of two ranks, run again, and end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import committed_steps
from tests import places
from tests.integrations.transformers.jobs import run
from tests.ports import free_port

HERE = Path(__file__).parents[3]
PROGRAM = "tests.integrations.transformers.program"
LIMIT_S = 240


class Program:
    """The script in one folder, by so many ranks."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.folder, self.ranks = folder, ranks

    def run(self, *, sign: int | None = None, after: int = 0) -> list[int]:
        """Run it; send a signal to the ranks once rank 0 has begun so many steps. The exit codes."""
        ranks = [self._start(rank, self.port) for rank in range(self.ranks)]
        begun = 0
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                begun += line.startswith("step ")
                if begun == after and sign is not None:
                    for rank in ranks if sign == signal.SIGTERM else ranks[-1:]:
                        rank.send_signal(sign)
                    if sign == signal.SIGKILL:
                        break
            if sign == signal.SIGKILL:
                for rank in ranks:
                    rank.kill()  # one is dead; the others would wait for it
            return [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()

    @property
    def port(self) -> int:
        return free_port()

    def last(self) -> list[Any]:
        """How the ranks ended."""
        files = [self.folder / f"last-{rank}.json" for rank in range(self.ranks)]
        return [json.loads(file.read_text()) for file in files]

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if self.ranks > 1:
            at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            who = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            env |= at | who
        command = [sys.executable, "-m", PROGRAM, str(self.folder)]
        # Nobody reads what it complains of, and a pipe would be full at some time.
        return subprocess.Popen(
            command,
            cwd=HERE,
            env=env,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How a run ends that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return json.loads(json.dumps(run(folder, eval_strategy="epoch", num_train_epochs=4)))


@pytest.mark.timeout(900)
def test_a_process_that_is_killed_again_and_again_ends_bit_for_bit_the_same(
    tmp_path: Path, expected: Any
) -> None:
    program, dice = Program(tmp_path), random.Random(places.run_number())
    for _ in range(2):
        assert program.run(sign=signal.SIGKILL, after=dice.randint(4, 9)) == [-signal.SIGKILL]
    assert program.run() == [0]
    assert program.last() == [expected]


@pytest.mark.timeout(900)
def test_sigterm_saves_the_step_that_was_reached_and_nothing_is_done_twice(
    tmp_path: Path, expected: Any
) -> None:
    program = Program(tmp_path)
    assert program.run(sign=signal.SIGTERM, after=8) == [0]
    assert not (tmp_path / "last-0.json").exists(), "the script does not go on behind train()"
    assert committed_steps(tmp_path / "ckpts")[-1] in (8, 9)
    assert program.run() == [0]
    assert program.last() == [expected]


@pytest.mark.timeout(900)
def test_two_ranks_are_killed_and_stopped_and_end_bit_for_bit_the_same(tmp_path: Path) -> None:
    whole, cut = Program(tmp_path / "whole", ranks=2), Program(tmp_path / "cut", ranks=2)
    for folder in (whole.folder, cut.folder):
        folder.mkdir()
    assert whole.run() == [0, 0]
    cut.run(sign=signal.SIGKILL, after=random.Random(places.run_number()).randint(4, 6))
    assert cut.run(sign=signal.SIGTERM, after=3) == [0, 0]
    assert not (cut.folder / "last-0.json").exists()
    assert cut.run() == [0, 0]
    assert cut.last() == whole.last()
