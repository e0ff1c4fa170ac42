"""A loop of one's own with Accelerate goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from ckpt_core import ConfigError
from ckpt_transformers import AcceleratorCheckpoint
from tests.integrations.transformers.jobs import SMALL, Words, fingerprint, gpt, masked


class Count:
    """A custom object."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def _loop(root: Path, *, die_at: int = -1) -> dict[str, Any]:
    """Three epochs of dropout and an order that is drawn; saved after each epoch."""
    accelerator, count = Accelerator(cpu=True), Count()
    model: Any = gpt()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(Words(), batch_size=4, shuffle=True, collate_fn=masked)
    scheduler: Any = StepLR(optimizer, 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(count)
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
                if count.steps == die_at:
                    raise KeyboardInterrupt
            checkpoint.save(epoch + 1)
    states = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    return {
        "states": fingerprint(states),
        "count": count.steps,
        "rng": fingerprint(torch.get_rng_state()),
        "losses": losses[-6:],
    }


def test_a_loop_that_is_cut_short_ends_like_one_that_is_not(tmp_path: Path) -> None:
    expected = _loop(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        _loop(tmp_path / "cut", die_at=9)
    assert _loop(tmp_path / "cut") == expected


def test_what_keeps_its_states_to_itself_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    try:
        with pytest.raises(ConfigError, match="checkpoint_engine"):
            AcceleratorCheckpoint(accelerator, tmp_path / "ckpts")
    finally:
        accelerator.state.distributed_type = DistributedType.NO
