"""Ranks that save a state of which little changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer
from tests.multirank.crew import Rank
from tests.multirank.jobs import blank, options, same


def make_state(rank: int, step: int) -> dict[str, Any]:
    """A base that all ranks have alike, one of each rank, and what changes."""
    torch.manual_seed(7)
    return {
        "base": {str(number): torch.randn(90, 100) for number in range(4)},
        "adapter": torch.full((3000,), float(step)),
        "own": {"table": torch.full((5000,), float(rank)), "seen": step},
    }


def save_steps(who: Rank, root: str, steps: list[int], **changes: Any) -> list[int]:
    """Save the steps, then restore the newest; which steps there are."""
    state = make_state(who.rank, 0)
    settings = options(share_unchanged=True, eager_leaf_bytes=512, **changes)
    with Checkpointer(Path(root), settings, coordination=who.meet()) as ck:
        for step in steps:
            state["adapter"].fill_(step)
            state["own"]["seen"] = step
            ck.save(step, state, per_rank=["own"]).committed.result(60)
        live = blank(state)
        found = ck.restore(live)
        assert found is not None and found.step == steps[-1]
        live["own"]["seen"] = found.state["own"]["seen"]
        assert same(live["own"], state["own"]) and same(live["adapter"], state["adapter"])
        assert same(live["base"], state["base"])
        return list(ck.steps())
