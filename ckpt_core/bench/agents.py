"""The agent that a Checkpointer with levels leaves behind: a way of a benchmark ends it itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from ckpt_core.levels import read_status


def agent_of(root: Path) -> psutil.Process | None:
    """The process that is, or was last, the agent of a root; None: it has ended, or there never was one."""
    status = read_status(root)
    with suppress(psutil.NoSuchProcess):
        return None if status is None else psutil.Process(status.pid)
    return None


def end(agent: psutil.Process | None, timeout_s: float) -> None:
    """Kill it, and wait until it is gone."""
    if agent is not None:
        with suppress(psutil.NoSuchProcess):
            agent.kill()
            agent.wait(timeout_s)
