"""The ways to train under Horovod that are compared. Pure values: needs neither torch nor Horovod."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.bench.contenders import OURS

INSTALL = "docs/horovod.md#installing says how to build it"

IN_STEP = "ckpt_core_in_step"
CHECKFREQ = "checkfreq_style"
MONOLITHIC = "monolithic_copy"
TORCH_SAVE = "torch_save_rank0"
NO_SPIN = "no_checkpoint_no_spin"
BASE = "no_checkpoint"


@dataclass(frozen=True, slots=True)
class Way:
    """What a reader must know about one of them.

    Attributes:
        fsyncs: whether a save that is complete survives a power cut; empty where nothing is saved.
        settings: how it is set up, besides the interval.
        layerwise: argument of `ckpt_horovod.DistributedOptimizer` where that saves.
    """

    fsyncs: str
    settings: str
    layerwise: str = ""


WAYS = {
    OURS: Way("yes", "layer-wise, enqueued at the end of the iteration (the default)", "lazy"),
    IN_STEP: Way("yes", "layer-wise, enqueued inside step()", "in_step"),
    CHECKFREQ: Way("yes", "save() after the step, wait_staged() before the next one"),
    MONOLITHIC: Way("yes", "save() and wait_staged() at once after the step"),
    TORCH_SAVE: Way("yes", "torch.save of rank 0 to one file, fsync of it and its directory"),
    NO_SPIN: Way("", "all-reduces are awaited by poll and sleep, as by all ways that save"),
    BASE: Way("", "hvd.DistributedOptimizer as it is, which spins while it waits"),
}
"""In the order of the report."""

NAMES = tuple(WAYS)
BASES = (BASE, NO_SPIN)
SAVING = tuple([name for name in NAMES if name not in BASES])

__all__ = [
    "BASE",
    "BASES",
    "CHECKFREQ",
    "INSTALL",
    "IN_STEP",
    "MONOLITHIC",
    "NAMES",
    "NO_SPIN",
    "OURS",
    "SAVING",
    "TORCH_SAVE",
    "WAYS",
    "Way",
]
