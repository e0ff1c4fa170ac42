"""Real agents of roots: started, watched, ended by their ids."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.levels import LEVELS, Plan, Status, read_status, write_plan
from ckpt_core.options import Level

PROGRAM = Path(__file__).with_name("agent_program.py")
_WAIT_S = 60.0


def until(ready: Callable[[], Any], *, what: str = "") -> Any:
    """Wait for something that comes; what it gives."""
    deadline = time.monotonic() + _WAIT_S
    while not (found := ready()):
        assert time.monotonic() < deadline, what or "it did not come"
        time.sleep(0.01)
    return found


def plan_of(*levels: Level, session: int = 1, **changes: Any) -> Plan:
    """One with a token of its own."""
    return Plan("ab" * 8, session, secrets.token_hex(8), levels, **changes)


class Agents:
    """The agents that a test has started."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.environ: dict[str, str] = {}

    def start(self, root: Path, plan: Plan | None = None, **timing: Any) -> subprocess.Popen[bytes]:
        """Start one, with a plan if there is none yet."""
        if plan is not None:
            write_plan(root, plan)
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(root), json.dumps(timing)],
            env={**os.environ, **self.environ},
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def run(self, root: Path, plan: Plan | None = None, **timing: Any) -> Status:
        """Start one and wait for its end: what it said last."""
        process = self.start(root, plan, **timing)
        return self.ended(process, root)

    def ended(self, process: subprocess.Popen[bytes], root: Path) -> Status:
        """Wait for the end of one: what it said last."""
        _, errors = process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0 and not errors, errors.decode()
        status = read_status(root)
        assert status is not None
        return status

    def end_all(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def log_of(root: Path) -> str:
    """What the agent has had to say."""
    return (root / LEVELS / "agent.log").read_text()
