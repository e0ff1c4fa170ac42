"""The suite `lightning`: the ways that are compared. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.fits import BASE, FitSettings, suite_of_fits
from ckpt_core.bench.results import Setup

MODEL_CHECKPOINT = "model_checkpoint"
ASYNC_IO = "async_checkpoint_io"

WAYS = {
    OURS: Setup("ckpt-core", "yes", "AsyncCheckpoint(save_last=False)"),
    MODEL_CHECKPOINT: Setup("ModelCheckpoint", "no", "the newest file is kept"),
    ASYNC_IO: Setup("ModelCheckpoint + AsyncCheckpointIO", "no", "the newest file is kept"),
    BASE: Setup("no saves", "", "enable_checkpointing=False"),
}
"""In the order of the report."""

NAMES = tuple(WAYS)


@dataclass(frozen=True, kw_only=True)
class LightningSettings(FitSettings):
    """One run under Lightning."""

    contenders: tuple[str, ...] = NAMES

    suite: ClassVar = "lightning"
    ways: ClassVar = WAYS
    worker: ClassVar = "ckpt_lightning_tools.bench.worker:LightningWorker"


SUITE = suite_of_fits(LightningSettings)
