"""Training runs with a level and the real agent, in processes that may be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, Level
from tests.crash.promises import QuickFiles
from tests.crash.warm import forked
from tests.levels.trainers import options, processes


def make_state(step: int) -> dict[str, Any]:
    """Some 100 kB that are a function of the step."""
    torch.manual_seed(step)
    return {"w": torch.randn(20_000), "b": torch.randn(500), "step": step}


def is_of_step(state: dict[str, Any]) -> bool:
    """Bit for bit."""
    right = make_state(state["step"])
    return all(torch.equal(state[name], right[name]) for name in ("w", "b"))


def train(root: str, levels: list[dict[str, Any]], *, steps: int, die_at: int | None = None) -> int:
    """Resume, save so many steps more, and be killed right behind the commit of one; the first of them."""
    with Checkpointer(
        root, options(), levels=[Level(**one) for one in levels], files=QuickFiles()
    ) as ck:
        state = make_state(0)
        found = ck.restore(state)
        assert found is None or is_of_step({**state, "step": found.state["step"]})
        first = 1 if found is None else found.step + 1
        for step in range(first, first + steps):
            ck.save(step, make_state(step)).committed.result(60)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return first


def train_to_the_end(
    root: str, levels: list[dict[str, Any]], *, steps: list[int], environ: dict[str, str]
) -> None:
    """Save, wait until the last step is at the first level, and be killed with the agent at once."""
    os.environ.update(environ)
    ck = Checkpointer(root, options(), levels=[Level(**one) for one in levels], files=QuickFiles())
    for step in steps:
        ck.save(step, make_state(step))
    ck.wait(level=1, last=True)
    for pid in processes(Path(root)):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def ended(root: str, levels: list[dict[str, Any]], **more: Any) -> None:
    """`train_to_the_end` in a process of its own, which dies."""
    sent, problem = forked(lambda: train_to_the_end(root, levels, **more))
    assert sent == signal.SIGKILL, problem


def killed(root: str, levels: list[dict[str, Any]], *, steps: int, die_at: int) -> None:
    """`train` in a process of its own, which dies."""
    sent, problem = forked(lambda: _drop(train(root, levels, steps=steps, die_at=die_at)))
    assert sent == signal.SIGKILL, problem


def _drop(first: int) -> None:
    """Its child reports nothing."""
