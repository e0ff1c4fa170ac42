"""A loop of a user's own with Accelerate, which is killed and run again: `python -m ...program FOLDER...`.

As `program`: alone or as one of two, in each folder in turn, with a line for each step that begins.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from ckpt_core import committed_steps
from ckpt_transformers import AcceleratorCheckpoint
from tests.integrations.transformers.jobs import SMALL, Words, fingerprint, gpt, masked
from tests.integrations.transformers.program import wait_until, without


class Count:
    """A custom object."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def loop(root: Path, *, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """Three epochs of dropout and an order that is drawn; saved after each epoch."""
    accelerator, count = Accelerator(cpu=True), Count()
    model: Any = gpt()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(Words(), batch_size=4, shuffle=True, collate_fn=masked)
    scheduler: Any = StepLR(optimizer, 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(count)
    torch.manual_seed(accelerator.process_index)  # dropout differs from rank to rank
    losses = []
    with AcceleratorCheckpoint(accelerator, root, options=SMALL) as checkpoint:
        for epoch in range(checkpoint.restore() or 0, 3):
            for batch in loader:
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                count.steps += 1
                on_step(count.steps)
            checkpoint.save(epoch + 1)
    states = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    return {
        "states": fingerprint(states),
        "count": count.steps,
        "rng": fingerprint(torch.get_rng_state()),
        "losses": losses[-3:],
    }


def train(folder: Path) -> None:
    """One run, from wherever its root says, to the end."""
    print(f"run {folder.name}", flush=True)
    hold_at, begun = int(os.environ.get("HOLD_AT", 0)), 0

    def on_step(step: int) -> None:
        nonlocal begun
        begun += 1
        print(f"step {step}", flush=True)
        if step == 5:
            wait_until(lambda: bool(committed_steps(folder / "ckpts")))
        if begun == hold_at:
            wait_until(lambda: False)  # to be killed

    last = loop(folder / "ckpts", on_step=on_step)
    (folder / f"last-{os.environ['RANK']}.json").write_text(json.dumps(last))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    *whole, last = map(Path, sys.argv[1:])
    for folder in whole:
        with without("HOLD_AT"):
            train(folder)
    train(last)
