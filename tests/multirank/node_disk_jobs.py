"""What the ranks of a test do that have further levels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckpt_core import Checkpointer, Level
from ckpt_core.levels import read_plan
from tests.multirank.crew import Rank
from tests.multirank.jobs import blank, make_state, options, root_of, same

_REACHED_S = 60


def levels_of(who: Rank, root: str) -> list[Level]:
    """A disk of each node, of the same name everywhere, and one that all see."""
    home = Path(root) / f"machine-{who.node}"
    home.mkdir(exist_ok=True)
    os.chdir(home)
    # A path that leads to another place in each process, and in the agent that it starts.
    return [
        Level("/proc/self/cwd/disk", keep_last=2),
        Level(str(Path(root) / "shared"), keep_last=2),
    ]


def save_to_levels(who: Rank, root: str, steps: list[int]) -> list[str]:
    """Save, and wait until each step is at both levels; which levels are the node's own."""
    own = root_of(who, root)
    with Checkpointer(own, options(), coordination=who.meet(), levels=levels_of(who, root)) as ck:
        for step in steps:
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            for level in (1, 2):
                handle.reached(level).result(_REACHED_S)
        plan = read_plan(own)
    assert plan is not None
    return [Path(url).name for url in plan.own]


def restore_from_levels(who: Rank, root: str) -> dict[str, Any]:
    """Go on from whatever there is."""
    levels = levels_of(who, root)
    with Checkpointer(root_of(who, root), options(), coordination=who.meet(), levels=levels) as ck:
        state = blank(make_state(who.rank, 1))
        found = ck.restore(state)
        assert found is not None
        state["step"] = found.state["step"]
        state["sampler"]["seen"] = found.state["sampler"]["seen"]
        return {"step": found.step, "same": same(state, make_state(who.rank, found.step))}
