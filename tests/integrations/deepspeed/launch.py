"""Runs jobs on real DeepSpeed ranks, many in one launch, and ends every process it started.

Each job is a function of `jobs.py`, or of the module before its dot, that every rank calls in turn, in a
folder of its own; it returns what JSON can hold. Its ranks are forks of one that has imported DeepSpeed,
with the environment that torchrun would give them; `torchrun` is the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ckpt_core.bench.meeting import free_port
from tests.forks import Forks

TOP = Path(__file__).parents[3]
LIMIT_S = 280
_SHOWN = 12000
_PROGRAM = "tests.integrations.deepspeed.program"
_ENVIRON = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "default"}
_FORKS = Forks("deepspeed", "torch._dynamo", environ=_ENVIRON)
_LOOK_S = 0.02


@dataclass(frozen=True)
class Job:
    """What every rank does once: a function (`program.job_of`), with a folder that all ranks share."""

    call: str
    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict)


def run(
    jobs: list[Job],
    *,
    ranks: int,
    place: Path,
    limit_s: float = LIMIT_S,
    start: Callable[..., tuple[int, str]] | None = None,
) -> list[list[Any]]:
    """Results of each job by rank; AssertionError with the output when a rank fails or hangs.

    Args:
        start: `torchrun` for jobs that must not find what the forks have imported.
    """
    place.mkdir(parents=True, exist_ok=True)
    plan = [[job.call, str(job.folder), job.arguments] for job in jobs]
    (place / "plan.json").write_text(json.dumps(plan))
    code, output = (start or _forked)(["-m", _PROGRAM, str(place)], ranks=ranks, limit_s=limit_s)
    found = []
    for number, job in enumerate(jobs):
        results = [place / f"{number}.{rank}.json" for rank in range(ranks)]
        assert all(path.exists() for path in results), f"{job.call} failed ({code}):\n{output}"
        found.append([json.loads(path.read_text()) for path in results])
    return found


def _forked(arguments: list[str], *, ranks: int, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """As `torchrun`, of forks."""
    environ = os.environ | _ENVIRON | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as log:
        started = [
            _FORKS.popen(
                [sys.executable, *arguments],
                cwd=TOP,
                env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        codes: list[int | None] = [None]
        try:
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                codes = [one.poll() for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
        log.seek(0)
        output = log.read()[-_SHOWN:].decode(errors="replace")
    return next((code for code in codes if code), 0 if None not in codes else 1), output


def torchrun(arguments: list[str], *, ranks: int, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """torchrun to its end, or to the deadline: its exit code and what was printed last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    with subprocess.Popen(
        command,
        cwd=TOP,
        env=os.environ | _ENVIRON,
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
