"""A loop of one's own with Accelerate goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType
from torch.utils.data import RandomSampler

from ckpt_core import ConfigError
from ckpt_transformers import AcceleratorCheckpoint
from tests.integrations.transformers.accelerate_program import loop


def _dies_at_9(step: int) -> None:
    if step == 9:
        raise KeyboardInterrupt


def test_a_loop_that_is_cut_short_ends_like_one_that_is_not(tmp_path: Path) -> None:
    expected = loop(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "cut", on_step=_dies_at_9)
    assert loop(tmp_path / "cut") == expected


def test_an_epoch_that_ranks_drew_together_begins_again_in_its_own_order(tmp_path: Path) -> None:
    def shuffled() -> Any:
        """As it is on several ranks, prepared by hand on one."""
        generator = torch.Generator().manual_seed(4)
        sampler: Any = RandomSampler(range(20), generator=generator)
        return DataLoaderShard(
            range(20), sampler=sampler, batch_size=5, synchronized_generator=generator
        )

    def order(loader: Any) -> list[int]:
        return [int(item) for batch in loader for item in batch]

    accelerator, loader = Accelerator(cpu=True), shuffled()
    accelerator._dataloaders = [loader]
    with AcceleratorCheckpoint(accelerator, tmp_path / "ckpts") as checkpoint:
        order(loader)
        checkpoint.save(1)  # between two epochs
        second = []
        for number, batch in enumerate(loader):
            second += batch.tolist()
            if number == 1:
                checkpoint.save(2)  # in the middle of one
        third = order(loader)
    assert second != third
    for step in (1, 2):
        accelerator._dataloaders = [loader := shuffled()]
        with AcceleratorCheckpoint(accelerator, tmp_path / "ckpts") as checkpoint:
            checkpoint.restore(step)
            assert [order(loader), order(loader)] == [second, third]


def test_what_keeps_its_states_to_itself_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    try:
        with pytest.raises(ConfigError, match="checkpoint_engine"):
            AcceleratorCheckpoint(accelerator, tmp_path / "ckpts")
    finally:
        accelerator.state.distributed_type = DistributedType.NO
