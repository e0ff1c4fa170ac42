"""How the tests start the examples, and what they read from them."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from tests import places
from tests.forks import Forks

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


@dataclass(frozen=True)
class Run:
    """One life of a job."""

    returncode: int
    output: str

    @property
    def resumed(self) -> int | None:
        """The step that it said it resumed from."""
        match = re.search(r"^resumed from step (\d+)$", self.output, re.MULTILINE)
        return None if match is None else int(match[1])


@dataclass(frozen=True)
class Job:
    """One training job: its root, its result, the one command that starts and resumes it."""

    folder: Path
    device: str = field(default="cpu", kw_only=True)
    forks: Forks | None = field(default=None, kw_only=True)
    """What has imported most of it; None: the command as people give it."""

    @property
    def start(self) -> Callable[..., subprocess.Popen[str]]:
        """As `subprocess.Popen`."""
        return subprocess.Popen if self.forks is None else self.forks.popen

    @property
    def root(self) -> Path:
        """Directory of its checkpoints."""
        return self.folder / "ckpts"

    @property
    def result(self) -> Path:
        """File of its result."""
        return self.folder / "result.txt"

    def arguments(self, *, steps: int, every: int) -> list[str]:
        """What every example takes."""
        given = ["--root", str(self.root), "--result", str(self.result)]
        return [*given, "--steps", str(steps), "--every", str(every), "--device", self.device]


LIMIT_S = 240


@dataclass(frozen=True)
class Alone(Job):
    """A job of one process, that prints a line for each loss."""

    example: Path
    steps: int
    every: int
    flags: tuple[str, ...] = ()
    """For Python."""

    def run(
        self,
        *,
        until: Callable[[str], bool] = lambda line: False,
        sent: signal.Signals = signal.SIGKILL,
        after_s: float = 0.0,
    ) -> Run:
        """The command, to its end; or until a line after which a signal is `sent`, a while later."""
        command = [sys.executable, *self.flags, str(self.example)]
        command += self.arguments(steps=self.steps, every=self.every)
        output = ""
        with self.start(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    output += line
                    if until(line):
                        time.sleep(after_s)
                        process.send_signal(sent)
                        if sent == signal.SIGKILL:
                            # No reading to the end: its workers hold the pipe until they miss it.
                            break
                process.wait(LIMIT_S)
            finally:
                process.kill()
        return Run(process.returncode, output)

    def run_to_its_end(self) -> Run:
        """Which is a good one."""
        run = self.run()
        assert run.returncode == 0, run.output
        return run

    def losses_after_a_commit(self, number: int) -> Callable[[str], bool]:
        """For `until`: this life has committed a step, and told of so many losses since."""
        before, told = self._newest(), 0

        def reached(line: str) -> bool:
            nonlocal told
            told += line.startswith("step ") and self._newest() > before
            return told == number

        return reached

    def _newest(self) -> str:
        """Name of the newest committed step; names ascend as steps do."""
        return max((path.name for path in self.root.glob("step-*")), default="")


def torchrun(ranks: int) -> list[str]:
    """The command before the path of an example."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(ranks)]


def horovodrun(ranks: int) -> list[str]:
    """The same, of Horovod."""
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks)]
    return [*command, sys.executable]


@dataclass(frozen=True)
class RanksRun(Run):
    """One life of a job of several ranks."""

    killed: bool
    """A rank was, before its end."""


@dataclass(frozen=True)
class Ranks(Job):
    """A job of several ranks."""

    example: Path
    steps: int
    every: int
    ranks: int = 2
    launcher: Callable[[int], list[str]] = torchrun

    def run(self, *, kill_after: int | None = None) -> RanksRun:
        """The command to its end, or until a rank is killed: so many losses after a commit."""
        command = [*self.launcher(self.ranks), str(self.example)]
        command += self.arguments(steps=self.steps, every=self.every)
        with self.start(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            before, output, told, killed = self._committed(), "", 0, False
            try:
                for line in process.stdout:
                    output += line
                    told += bool(_TOLD.search(line)) and self._committed() > before
                    if told == kill_after:
                        killed, kill_after = self._kill_one(process.pid), None
                process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    for child in psutil.Process(process.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            child.kill()
                    process.kill()
        return RanksRun(process.returncode, output, killed)

    def run_to_its_end(self) -> str:
        """What was printed."""
        run = self.run()
        assert run.returncode == 0, run.output
        return run.output

    def _committed(self) -> int:
        """When the newest commit was written."""
        newest = 0
        for path in self.root.glob("*/manifest.json"):
            with contextlib.suppress(FileNotFoundError):  # retired meanwhile
                newest = max(newest, path.stat().st_mtime_ns)
        return newest

    def _kill_one(self, launcher: int) -> bool:
        """Whether it was before its end: the job may have just ended."""
        ranks = [one for one in _children(launcher) if self._is_rank(one)]
        ranks.sort(key=lambda one: one.pid)
        return bool(ranks) and _kill(random.Random(places.run_number()).choice(ranks))

    def _is_rank(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.name().startswith("python") and str(self.example) in process.cmdline()
        return False


def _children(launcher: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(launcher).children(recursive=True))
    return []


def _kill(process: psutil.Process) -> bool:
    """Whether it ends by that: once it is seen to be stopped, it cannot end by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
        while (status := process.status()) != psutil.STATUS_ZOMBIE:
            if status == psutil.STATUS_STOPPED:
                process.kill()
                return True
            time.sleep(0.001)
    return False


_LIVES = 5
_TOLD = re.compile(r"(^|:)step ")


def resumed_steps(output: str) -> list[int]:
    """The steps that ranks said they resumed from.

    horovodrun says first who speaks; under torchrun another rank may speak before the end of a line.
    """
    return [int(step) for step in re.findall(r"resumed from step (\d+)", output)]


def killed_life(job: Ranks) -> tuple[Ranks, RanksRun]:
    """A life one of whose ranks was killed, and whose job that is: another folder where it came too late."""
    for number in range(_LIVES):
        one = replace(job, folder=job.folder / f"life-{number}")
        one.folder.mkdir()
        run = one.run(kill_after=2)
        if run.killed:
            return one, run
    raise AssertionError(f"a rank was to be killed: the job had ended each time\n{run.output}")


def check_killed_and_resumed(fresh: Ranks, untouched: Ranks) -> int:
    """A job one of whose ranks is killed goes on from one step on all ranks, and ends in the same bits.

    Returns the exit status of the life that was cut short.
    """
    job, cut_short = killed_life(fresh)
    output = job.run_to_its_end()
    last = resumed_steps(output)
    assert len(last) == job.ranks and len(set(last)) == 1, (
        f"all ranks resume from one step\n{output}"
    )
    assert last[0] % job.every == 0 and last[0] > 0
    assert job.result.read_bytes() == untouched.result.read_bytes()
    return cut_short.returncode


def check_killed_again_and_again(job: Alone, untouched: Alone, *, kills: int, seed: int) -> None:
    """A job that is killed so many times, some losses after a commit, ends in the bits of another one."""
    dice = random.Random(seed)
    resumed: list[int] = []
    for _ in range(kills):
        reached = job.losses_after_a_commit(dice.randint(1, 2))
        run = job.run(until=reached, after_s=dice.uniform(0.0, 0.1))
        resumed += [] if run.resumed is None else [run.resumed]
        assert run.returncode in (-9, 0), run.output
    job.run_to_its_end()
    assert resumed, "a life that was killed after a commit is followed by one that resumes"
    assert resumed == sorted(resumed), "a restart never goes back behind an earlier one"
    assert all(step % job.every == 0 for step in resumed)
    assert job.result.read_bytes() == untouched.result.read_bytes()
