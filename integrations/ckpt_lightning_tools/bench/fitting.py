"""One fit under Lightning, with one of the ways to save, under the clock. Needs torch and Lightning."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, Dataset

from ckpt_core.bench.contenders import OURS, State
from ckpt_core.bench.fit_clock import Begun, FitClock, Fitted
from ckpt_core.bench.fits import BASE
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.window import Window
from ckpt_core.bench.workloads import language_model, next_word_loss, token_batches
from ckpt_core.options import Options
from ckpt_lightning_tools.bench.suite import ASYNC_IO, MODEL_CHECKPOINT

HOOKS = (
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
)
"""All that a callback is asked between two steps."""


class Tokens(Dataset[torch.Tensor]):
    """Random batches, a few of them over and over; longer than any fit, so that none ends an epoch."""

    def __init__(self, size: dict[str, Any], length: int) -> None:
        self._length = length
        self._batches = token_batches(size, torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batches[index % len(self._batches)]


class LanguageModel(LightningModule):
    """The language model of the other suites, with AdamW. Overrides no hook."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.model = language_model(size["width"], size["layers"], size["vocabulary"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        return next_word_loss(self.model(batch[:, :-1]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Tells a clock when steps begin, and when the last one is over."""

    def __init__(self, clock: FitClock) -> None:
        self._clock = clock

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Comes before the same hook of a callback that saves, which Lightning puts last."""
        self._clock.step_begins(batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes after all of the last batch, and before the end of what is still to be written."""
        self._clock.window_ends()


class Ends(Callback):
    """Ends a fit at its first step."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """The first one."""
        raise Begun


def model(size: dict[str, Any]) -> LanguageModel:
    """As `Fitting` has it."""
    return LanguageModel(size)


def fit(
    name: str,
    module: LanguageModel,
    *,
    size: dict[str, Any],
    window: Window,
    root: Path,
    staging_bytes: int | None = None,
) -> Fitted:
    """As `Fitting` has it."""
    steps = window.lead + window.steps
    clock = FitClock(window)
    savers, plugins = way(name, root, window.every, staging_bytes)
    for saver in savers:
        clock.watch(saver, HOOKS)
    trainer = new_trainer([Clock(clock), *savers], plugins, steps, saves=bool(savers))
    began = time.perf_counter()
    trainer.fit(module, data(size, steps))
    return clock.found(
        fit_s=time.perf_counter() - began,
        processor_s=processor_s(os.getpid()),
        state=live_state(module, trainer),
    )


def resume(name: str, module: LanguageModel, *, size: dict[str, Any], root: Path) -> float:
    """As `Fitting` has it."""
    savers, plugins = way(name, root, 2, None)
    trainer = new_trainer([Ends(), *savers], plugins, 1000, saves=True)
    path = "last" if name == OURS else str(newest(root))
    began = time.perf_counter()
    with contextlib.suppress(Begun):
        trainer.fit(module, data(size, 1000), ckpt_path=path, weights_only=False)
    return time.perf_counter() - began


def data(size: dict[str, Any], steps: int) -> Any:
    """Twice as many batches as there are steps."""
    return DataLoader(Tokens(size, 2 * steps), batch_size=None)


def new_trainer(
    callbacks: list[Callback], plugins: list[Any], steps: int, *, saves: bool, **more: Any
) -> Trainer:
    """A quiet one, on CPUs."""
    return Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        plugins=plugins,
        enable_checkpointing=saves,
        max_epochs=-1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def way(
    name: str, root: Path, every: int, staging_bytes: int | None
) -> tuple[list[Callback], list[Any]]:
    """Callbacks and plugins of a way."""
    if name == BASE:
        return [], []
    if name == OURS:
        from ckpt_lightning import AsyncCheckpoint  # by this way alone: the others have none of it

        options = Options(staging_bytes=staging_bytes)
        saver = AsyncCheckpoint(
            root, every_n_steps=every, save_last=False, on_error="raise", options=options
        )
        return [saver], []
    assert name in (MODEL_CHECKPOINT, ASYNC_IO)
    plugins = [AsyncCheckpointIO()] if name == ASYNC_IO else []
    return [ModelCheckpoint(root, every_n_train_steps=every)], plugins


def live_state(module: LightningModule, trainer: Trainer) -> State:
    """Aliases of every weight and optimizer tensor."""
    return _named(module.state_dict(), trainer.optimizers[0].state_dict())


def saved_state(name: str, root: Path) -> State:
    """The same from the newest file or step of a way."""
    if name == OURS:
        from ckpt_lightning import load

        tree = load(root)
    else:
        tree = torch.load(newest(root), weights_only=True)
    return _named(tree["state_dict"], tree["optimizer_states"][0])


def newest(root: Path) -> Path:
    """What ModelCheckpoint has saved last."""
    return max(root.glob("*.ckpt"), key=_step_of)


def _step_of(path: Path) -> int:
    """Of a file of ModelCheckpoint, "epoch=0-step=4.ckpt".

    Not by time: AsyncCheckpointIO may write a file only after ModelCheckpoint has looked for it to remove
    it, and the next one within the same tick of the clock.
    """
    return int(path.stem.rpartition("step=")[2])


def _named(weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> State:
    state: State = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    for index, values in optimizer["state"].items():
        state |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    return state
