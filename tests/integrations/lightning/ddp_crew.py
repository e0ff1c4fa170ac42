"""Starts the ranks of a job as real processes, gives them work, and ends them."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt_core.bench.meeting import free_port
from tests.forks import Forks

HERE = Path(__file__).parents[3]
PROGRAM = "tests.integrations.lightning.ddp_program"
TIMEOUT_S = 200.0
_GONE = '{"error": "", "traceback": "it is gone"}'


class Crew:
    """The ranks of one job. Must be closed."""

    def __init__(self, forks: Forks, ranks: int, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        port = free_port()
        self.processes = [
            forks.popen(
                [sys.executable, "-m", PROGRAM, rank, ranks, port],
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer_of(self, rank: int) -> dict[str, Any]:
        """What one rank answers to the job, the others aside."""
        return self._lines([rank])[rank]

    def begin(self, **job: Any) -> Path:
        """Give all ranks a job; returns where its tensors will be."""
        self._count += 1
        out = self._folder / f"job{self._count}"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job, "out": str(out)}, default=str) + "\n")
            process.stdin.flush()
        return out

    def fit(self, **job: Any) -> Answers:
        """Let all ranks train, and wait for them."""
        out = self.begin(**job)
        found = self._lines(range(len(self.processes)))
        answers = Answers(out, [found[rank] for rank in sorted(found)])
        for rank, answer in enumerate(answers.rows):
            assert "error" not in answer, f"rank {rank}: {answer['traceback']}"
        return answers

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self.kill()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _lines(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """One line of each rank, which must come in time; all ranks are ended if it does not."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                pipe = self.processes[rank].stdout
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, (rank, pipe))
            while len(found) < len(ranks):
                events = selector.select(timeout=max(deadline - time.monotonic(), 0))
                for key, _ in events:
                    rank, pipe = key.data
                    found[rank] = json.loads(pipe.readline() or _GONE)
                    selector.unregister(pipe)
                if not events:
                    self.kill()
                    raise AssertionError(f"ranks did not come to an end; answers: {found}")
        return found


class Answers:
    """How a job went on each rank."""

    def __init__(self, out: Path, rows: list[dict[str, Any]]) -> None:
        self._out, self.rows = out, rows

    def tensors(self, rank: int) -> dict[str, Any]:
        """What the rank began and ended with."""
        found: dict[str, Any] = torch.load(f"{self._out}.{rank}", weights_only=False)
        return found

    def samples(self, epoch: int) -> list[int]:
        """Samples that were seen in an epoch, by all ranks."""
        rows = [row for answer in self.rows for row in answer["samples"]]
        return [sample for at, _, ids in rows if at == epoch for sample in ids]

    def steps(self, rank: int = 0) -> list[int]:
        """Training steps that were made."""
        return [step for _, step, _ in self.rows[rank]["samples"]]
