"""A process that trains, and an agent that only holds its lock: the test says what it has done."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, Level, Options
from ckpt_core.layout import Manifest
from ckpt_core.levels import LEVELS, LevelStatus, Status, read_plan, read_status, write_status
from ckpt_core.levels.trainer import spawning
from ckpt_core.levels.trainer.joining import read_run
from ckpt_core.store import step_path, writer_of
from tests.crash.promises import QuickFiles

SOON_S = 60.0

IDLE = """
import sys, time
from pathlib import Path
from ckpt_core.levels import read_plan
from ckpt_core.store import RootLock, writer_of
root = Path(sys.argv[1])
with RootLock(root / ".levels"):
    while writer_of(root) is not None:
        time.sleep(0.02)
"""


def options(**changes: Any) -> Options:
    given: dict[str, Any] = {"chunk_bytes": 4096, "writers": 1, "keep_last": 1, "timeout": 60.0}
    return Options(**(given | changes))


def until(ready: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something holds."""
    deadline = time.monotonic() + SOON_S
    while not (found := ready()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)
    return found


def agent_of(root: Path) -> int | None:
    """The process that holds the agent's lock."""
    owner = writer_of(root / LEVELS)
    return None if owner is None else owner["pid"]


def processes(root: Path) -> list[int]:
    """All that have been started for a root, and live."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if str(root).encode() in words:
                found.append(int(place.name))
    return found


def attempt_of(root: Path, step: int) -> str:
    """The save that a committed step is of."""
    path = step_path(root, step) / "manifest.json"
    return Manifest.decode(path.read_bytes(), path=path).attempt


def end_agent(root: Path) -> None:
    """Whatever the test has left."""
    pid = agent_of(root)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: agent_of(root) is None, "the end of the agent")


def wait_for_agent(root: Path) -> None:
    """Until it has taken everything on, and has ended. It may be starting still."""
    # A second one that was started beside it may only then get the lock.
    until(lambda: read_status(root) is not None and not processes(root), "the end of the agent")
    # Read again: it may have ended between the two looks.
    status = read_status(root)
    assert status is not None and status.ended == "up to date"


class Bench:
    """A root, a directory level, and what the agent is to have said of it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.url = str(folder / "far")

    def open(self, *levels: Level, **changes: Any) -> Checkpointer:
        given = levels or (Level(self.url),)
        return Checkpointer(self.root, options(**changes), levels=given, files=QuickFiles())

    def say(self, *levels: LevelStatus, ended: str = "", **hosting: str) -> None:
        """As the agent that goes by the plan that is there."""
        plan = read_plan(self.root)
        assert plan is not None
        given = levels or (LevelStatus(self.url),)
        said = Status(os.getpid(), "here", plan.token, list(given), ended=ended, **hosting)
        write_status(self.root, said)

    @property
    def run(self) -> str | None:
        return read_run(self.root)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """With an agent that only holds its lock."""

    def idle(name: str, root: str) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", IDLE, root], dict(os.environ)

    monkeypatch.setattr(spawning, "child", idle)
    made = Bench(tmp_path)
    yield made
    end_agent(made.root)
