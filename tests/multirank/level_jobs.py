"""What the ranks of a test of levels do; each function runs in every rank."""

from __future__ import annotations

import os
import signal
from typing import Any

from ckpt_core import Checkpointer, CkptError, Level
from tests.levels.trainers import agent_of, until
from tests.multirank.crew import Rank
from tests.multirank.jobs import make_state, options, root_of


def save_on(
    who: Rank, root: str, levels: list[Any], steps: list[int], kill_agent: bool = False
) -> list[Any]:
    """Save the steps; each rank waits for its own future, and in the end for all that is due."""
    told = []
    with Checkpointer(root_of(who, root), options(), levels=levels, coordination=who.meet()) as ck:
        for step in steps:
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            ck.wait_staged()
            handle.committed.result(60)
            if kill_agent and step == steps[1]:
                pid = until(lambda: agent_of(root_of(who, root)), "an agent")
                if ck._engine.coordination.info.leads:
                    os.kill(pid, signal.SIGKILL)
            told.append(handle.reached(1).result(60))
        for level in range(1, len(levels) + 1):
            ck.wait(level=level)
        told.append([gauge.newest for gauge in ck.gauges.levels()])
    return told


def opens(who: Rank, root: str, levels: list[list[Any]]) -> str:
    """Each rank with levels of its own."""
    try:
        mine = [Level(**one) for one in levels[who.rank]]
        Checkpointer(root_of(who, root), options(), levels=mine, coordination=who.meet()).close()
    except CkptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "opened"
