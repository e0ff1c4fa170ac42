"""A frozen backbone under Lightning: each step adds what is trained, and the backbone is one file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_core import verify
from tests.integrations.lightning import models
from tests.integrations.lightning.running import SMALL, differences, ending, fit, saver


class Frozen(models.Net):
    """`Net` on a backbone that nobody trains, 99 parts of a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(models.FEATURES, 1500), nn.Linear(1500, 700))
        self.backbone.append(nn.Linear(700, models.FEATURES)).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((x + self.backbone(x) / 100, y))


def test_each_step_adds_a_few_percent_and_the_last_one_brings_everything_back(
    tmp_path: Path,
) -> None:
    sharing = dataclasses.replace(SMALL, share_unchanged=True, in_flight=1, eager_leaf_bytes=2048)
    callback = saver(tmp_path / "root", every_n_steps=1, options=sharing)
    trainer, module = fit(Frozen, models.train_loader, callback)
    steps = sorted((tmp_path / "root").glob("step-*"))
    seen, added = set[int](), []
    for step in steps:
        fresh = [path.stat() for path in step.iterdir() if path.stat().st_ino not in seen]
        seen |= {one.st_ino for one in fresh}
        added.append(sum(one.st_size for one in fresh))
    assert len(steps) == 15
    # Three saves to see that it stays; a file that had also what the end of the epoch lacks; a new one.
    assert max(added[8:]) < 0.05 * added[0], added
    assert verify(tmp_path / "root").ok
    again = saver(tmp_path / "root", every_n_steps=1, options=sharing)
    other, restored = fit(Frozen, models.train_loader, again, seed=8, ckpt_path="last")
    found, expected = ending(other, restored), ending(trainer, module)
    assert not differences(found["state_dict"], expected["state_dict"])
    assert not differences(found["optimizers"], expected["optimizers"])
