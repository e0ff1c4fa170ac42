"""A machine is lost with its disk; the same command on a fresh one goes on from the level, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt_core.levels import LEVELS, read_status
from ckpt_core.store import writer_of
from tests.examples.runs import EXAMPLES, LIMIT_S, Job, Run
from tests.forks import Forks
from tests.levels.servers.azurite import needs_azurite
from tests.levels.servers.moto import needs_store

EXAMPLE = EXAMPLES / "train_levels.py"
STEPS, EVERY, LEVEL_EVERY = 24, 2, 4


@dataclass(frozen=True)
class Levelled(Job):
    """The job of this example."""

    level: str = field(kw_only=True)
    environ: dict[str, str] = field(default_factory=dict, kw_only=True)

    def run(self, *, lose: bool = False) -> Run:
        """The command to its end, or until a step is at the level and the machine is lost with its disk."""
        command = [sys.executable, str(EXAMPLE), *self.arguments(steps=STEPS, every=EVERY)]
        command += ["--level", self.level, "--level-every", str(LEVEL_EVERY)]
        with self.start(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **self.environ}
        ) as process:
            try:
                if lose:
                    self._wait_for_the_level(process)
                    process.kill()
                output, _ = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        if lose:
            self.end_agent()
            shutil.rmtree(self.root)
        return Run(process.returncode, output)

    def _wait_for_the_level(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (status := read_status(self.root)) is None or not status.levels[0].steps:
            assert process.poll() in (None, 0) and time.monotonic() < deadline
            time.sleep(0.01)

    def end_agent(self) -> None:
        """It outlives the process that trains."""
        if (agent := writer_of(self.root / LEVELS)) is not None:
            with suppress(ProcessLookupError):
                os.kill(agent["pid"], signal.SIGKILL)
        while writer_of(self.root / LEVELS) is not None:
            time.sleep(0.01)


STORES = [
    pytest.param("moto", marks=needs_store, id="store"),
    pytest.param("azurite", marks=[needs_store, needs_azurite]),
]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture(params=["directory", *STORES])
def job(request: pytest.FixtureRequest, tmp_path: Path, forks: Forks) -> Iterator[Levelled]:
    """One with its level in a directory, and one with it in an object store."""
    if request.param == "directory":
        made = Levelled(tmp_path, level=str(tmp_path / "far"), forks=forks)
    else:
        server = request.getfixturevalue(request.param)
        level, environ = server.url("example"), server.environ()
        made = Levelled(tmp_path, level=level, environ=environ, forks=forks)
    yield made
    made.end_agent()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The result of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("untouched")
    untouched = Levelled(folder, level=str(folder / "far"))
    run = untouched.run()
    untouched.end_agent()
    assert run.returncode == 0 and run.resumed is None, run.output
    return untouched.result.read_bytes()


@pytest.mark.timeout(400)
def test_a_job_whose_machine_is_lost_goes_on_from_its_level_and_ends_in_the_same_bits(
    job: Levelled, expected: bytes
) -> None:
    lost = job.run(lose=True)
    assert lost.returncode in (-signal.SIGKILL, 0)
    assert not job.root.exists()
    last = job.run()
    assert last.returncode == 0, last.output
    assert last.resumed is not None and last.resumed % EVERY == 0, last.output
    assert job.result.read_bytes() == expected
