"""Run fits, and compare how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from ckpt_core import Options
from ckpt_core.options.presets import PRESETS
from ckpt_lightning import AsyncCheckpoint

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "num_sanity_val_steps": 0,
}
SMALL = Options(
    keep_last=None,
    timeout=30,
    eager_leaf_bytes=0,
    debug_barrier=True,
    chunk_bytes="64KiB",
    staging_bytes="2MiB",
    writers=2,
    readers=2,
)


def preset(name: str, **changes: Any) -> Options:
    """`SMALL`, but for what a preset says."""
    default, own = Options(), PRESETS[name].fields
    names = [field.name for field in dataclasses.fields(Options) if field.name not in own]
    small = {
        key: getattr(SMALL, key) for key in names if getattr(SMALL, key) != getattr(default, key)
    }
    return Options.preset(name, **(small | changes))


def trainer_of(*callbacks: Any, **options: Any) -> Trainer:
    """A quiet trainer on the CPU; three epochs unless told otherwise."""
    options = {"max_epochs": 3, **QUIET, **options}
    if not any(isinstance(callback, Checkpoint) for callback in callbacks):
        options.setdefault("enable_checkpointing", False)
    return Trainer(callbacks=list(callbacks), **options)


def saver(root: Path, **options: Any) -> AsyncCheckpoint:
    """A callback with little memory that keeps every step."""
    options.setdefault("options", SMALL)
    return AsyncCheckpoint(root, **options)


def ending(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Everything that must be equal when two runs are."""
    return {
        "state_dict": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "rng": torch.get_rng_state(),
        "count": getattr(module, "count", 0),
    }


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Where two endings differ, bit for bit."""
    if isinstance(first, torch.Tensor):
        same = isinstance(second, torch.Tensor) and torch.equal(first, second)
        return [] if same else [path]
    if isinstance(first, dict):
        if not isinstance(second, dict) or list(first) != list(second):
            return [f"{path}: keys"]
        return [
            row
            for name in first
            for row in differences(first[name], second[name], f"{path}.{name}")
        ]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [f"{path}: length"]
        pairs = zip(first, second, strict=True)
        return [row for n, (a, b) in enumerate(pairs) for row in differences(a, b, f"{path}.{n}")]
    return [] if first == second else [f"{path}: {first!r} != {second!r}"]


def fit(
    make: Callable[[], LightningModule],
    loaders: Callable[[], Any],
    *callbacks: Any,
    seed: int = 7,
    ckpt_path: str | None = None,
    val: Any = None,
    **options: Any,
) -> tuple[Trainer, LightningModule]:
    """Train a fresh module; `seed` seeds the process, as the user's script does."""
    torch.manual_seed(seed)
    module = make()
    trainer = trainer_of(*callbacks, **options)
    trainer.fit(module, loaders(), val, ckpt_path=ckpt_path)
    return trainer, module
