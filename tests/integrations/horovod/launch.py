"""Runs jobs on real Horovod ranks, many in one launch, and ends every process that it started.

    launch([Job("clip", "jobs_bits:compare", {"case": "clip"}), ...], ranks=2, folder=tmp_path).of("clip")

Each job is a function of this folder that every rank calls in turn; it returns what JSON can hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.forks import Forks

TOP = Path(__file__).parents[3]
PROGRAM = "tests.integrations.horovod.program"
HERE = "tests.integrations.horovod"
HOROVODRUN = (sys.executable, "-c", "from horovod.runner.launch import run_commandline as r; r()")
LAUNCHERS = Forks("horovod.torch", "horovod.runner.launch")
"""horovodrun imports itself, and asks a child whether Horovod can be imported."""

LIMIT_S = 200.0
_SHOWN = 6000


@dataclass(frozen=True)
class Job:
    """What every rank does once.

    Attributes:
        name: of the result; a file name.
        call: "module:function" of this folder; called with `arguments`, Horovod is initialised.
    """

    name: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a launch went.

    Attributes:
        folder: where the results are, one JSON file for each job and rank.
        output: what the ranks printed, interleaved.
        hung: whether the launch was ended at its deadline.
    """

    folder: Path
    ranks: int
    output: str
    hung: bool

    def of(self, name: str) -> list[Any]:
        """What each rank returned, in rank order; AssertionError with all that is known if one did not."""
        found = [self.of_rank(name, rank) for rank in range(self.ranks)]
        for rank, outcome in enumerate(found):
            if outcome is None or outcome["problem"]:
                why = "it never came to an end" if outcome is None else outcome["problem"]
                raise AssertionError(
                    f"rank {rank} of {name}: {why}\n{self._failed_before(name)}"
                    f"\nhung: {self.hung}\n--- output:\n{self.output[-_SHOWN:]}"
                )
        return [outcome["result"] for outcome in found if outcome is not None]

    def of_rank(self, name: str, rank: int) -> dict[str, Any] | None:
        """{"result": ..., "problem": a traceback or ""}; None: the rank did not come to its end."""
        path = self.folder / f"{name}.{rank}.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _failed_before(self, name: str) -> str:
        failed = sorted(
            path.name for path in self.folder.glob("*.json") if '"problem": "T' in path.read_text()
        )
        return f"jobs that failed: {failed}"


def launch(
    jobs: Sequence[Job],
    *,
    ranks: int,
    folder: Path,
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Run the jobs one after the other on so many ranks; returns when all processes have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"limit_s": limit_s, "jobs": [asdict(job) for job in jobs]}
    (folder / "plan").write_text(json.dumps(plan, default=str))
    printed = folder / "output"
    with printed.open("wb") as sink:
        process = LAUNCHERS.popen(
            [*HOROVODRUN, "--gloo", "-np", ranks, sys.executable, "-m", PROGRAM, folder],
            cwd=TOP,
            env=_environ(environ or {}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        hung = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            _end(process, folder)
    return Outcome(folder, ranks, printed.read_text(errors="replace"), hung)


def _environ(extra: Mapping[str, str]) -> dict[str, str]:
    given = {"OMP_NUM_THREADS": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    return {**os.environ, **given, **extra}


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End all processes of the launch: horovodrun gives each rank a session of its own."""
    doomed: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        doomed = [top, *top.children(recursive=True)]
    # Whoever lost its parent is nobody's child any more, but has left its number.
    for path in folder.glob("*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            number, born = path.read_text().split()
            rank = psutil.Process(int(number))
            if rank.create_time() == float(born):
                doomed.append(rank)
    for one in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs([one for one in doomed if one.pid != process.pid], timeout=10)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    partial = path.with_name(f"{path.name}.part{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def wait_for(paths: Sequence[Path], *, limit_s: float) -> bool:
    """Whether all of these came to exist in time."""
    deadline = time.monotonic() + limit_s
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
