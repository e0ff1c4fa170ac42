"""Runs jobs on real DeepSpeed ranks under torchrun, many in one launch, and ends every process it started.

Each job is a function of `jobs.py`, or of the module before its dot, that every rank calls in turn, in a
folder of its own; it returns what JSON can hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

TOP = Path(__file__).parents[3]
LIMIT_S = 280
_SHOWN = 12000


@dataclass(frozen=True)
class Job:
    """What every rank does once: a function (`program.job_of`), with a folder that all ranks share."""

    call: str
    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict)


def run(jobs: list[Job], *, ranks: int, place: Path, limit_s: float = LIMIT_S) -> list[list[Any]]:
    """Results of each job by rank; AssertionError with the output when a rank fails or hangs."""
    place.mkdir(parents=True, exist_ok=True)
    plan = [[job.call, str(job.folder), job.arguments] for job in jobs]
    (place / "plan.json").write_text(json.dumps(plan))
    code, output = run_ranks(
        ["-m", "tests.integrations.deepspeed.program", str(place)], ranks=ranks, limit_s=limit_s
    )
    found = []
    for number, job in enumerate(jobs):
        results = [place / f"{number}.{rank}.json" for rank in range(ranks)]
        assert all(path.exists() for path in results), f"{job.call} failed ({code}):\n{output}"
        found.append([json.loads(path.read_text()) for path in results])
    return found


def run_ranks(arguments: list[str], *, ranks: int, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """torchrun to its end, or to the deadline: its exit code and what was printed last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "default",
    }
    with subprocess.Popen(
        command,
        cwd=TOP,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            output = "hangs"
        finally:
            _end(process.pid)
    return process.returncode or 0, output[-_SHOWN:]


def _end(launcher: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.Process(launcher).kill()
