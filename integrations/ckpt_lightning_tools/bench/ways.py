"""The ways to train under Lightning that are compared. Pure values: needs neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.bench.contenders import OURS

BASE = "no_checkpoint"
MODEL_CHECKPOINT = "model_checkpoint"
ASYNC_IO = "async_checkpoint_io"


@dataclass(frozen=True, slots=True)
class Way:
    """What a reader must know about one of them.

    Attributes:
        fsyncs: whether a save that is complete survives a power cut.
        packages: what its process imports.
        settings: how it is set up, besides the interval.
    """

    fsyncs: str
    packages: tuple[str, ...]
    settings: str


_LIGHTNING = ("lightning.pytorch",)

WAYS = {
    OURS: Way("yes", (*_LIGHTNING, "ckpt_lightning"), "AsyncCheckpoint(save_last=False)"),
    MODEL_CHECKPOINT: Way("no", _LIGHTNING, "ModelCheckpoint, the newest file is kept"),
    ASYNC_IO: Way(
        "no", _LIGHTNING, "ModelCheckpoint and AsyncCheckpointIO, the newest file is kept"
    ),
    BASE: Way("", _LIGHTNING, "enable_checkpointing=False"),
}
"""In the order of the report."""

NAMES = tuple(WAYS)
