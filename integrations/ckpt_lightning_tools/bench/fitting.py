"""One fit under Lightning, with one of the ways to save, under the clock. Needs torch and Lightning.

What a way costs is the time inside the hooks of its callback: taking the state, writing it where it does
that at once, and waiting before the optimizer's update. What it costs besides, by keeping the processor or
the interpreter's lock from training, shows in the time of the steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, Dataset

from ckpt_core.bench.contenders import OURS, State
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.window import Window
from ckpt_core.bench.workloads import language_model, next_word_loss, token_batches
from ckpt_core.options import Options
from ckpt_lightning_tools.bench.suite import ASYNC_IO, BASE, MODEL_CHECKPOINT

_HOOKS = (
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
    """Notes when steps begin and end, and what the way's hooks take meanwhile."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._begins: list[float] = []
        self.worked_s = 0.0
        self._stall_s = 0.0
        self.end = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Comes before the same hook of a callback that saves, which Lightning puts last."""
        if batch_idx >= self._window.lead:
            if not self._begins:
                self.worked_s = processor_s(os.getpid())
            self._begins.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes after all of the last batch, and before the end of what is still to be written."""
        self.end = time.perf_counter()

    def watch(self, callback: Callback) -> None:
        """Count the time of the callback's hooks from now on, within the window."""
        for name in _HOOKS:
            setattr(callback, name, self._timed(getattr(callback, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                if self._begins and not self.end:
                    self._stall_s += time.perf_counter() - began

        return timed

    @property
    def step_seconds(self) -> list[float]:
        """Of each step under the clock."""
        ends = [*self._begins[1:], self.end]
        return [end - begin for begin, end in zip(self._begins, ends, strict=True)]

    @property
    def stall_s(self) -> float:
        """Of one save: all time in hooks, shared out over the saves."""
        return self._stall_s / (self._window.steps // self._window.every)


@dataclass(slots=True)
class Fitted:
    """What one fit found.

    Attributes:
        fit_s: from the call of `Trainer.fit` until it returned, with all files complete.
        processor_s: of all threads and children, from the first step under the clock until then.
        state: the live tensors at its end.
    """

    fit_s: float
    step_s: float
    longest_step_s: float
    stall_s: float
    processor_s: float
    state: State


def fit(
    name: str,
    module: LanguageModel,
    size: dict[str, Any],
    window: Window,
    root: Path,
    staging_bytes: int | None,
) -> Fitted:
    """Train `module` through a window of steps, saving below `root` in the way of that name."""
    steps = window.lead + window.steps
    data = DataLoader(Tokens(size, 2 * steps), batch_size=None)
    clock = Clock(window)
    savers, plugins = _way(name, root, window.every, staging_bytes)
    for saver in savers:
        clock.watch(saver)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[clock, *savers],
        plugins=plugins,
        enable_checkpointing=bool(savers),
        max_epochs=-1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    trainer.fit(module, data)
    fit_s = time.perf_counter() - began
    worked_s = processor_s(os.getpid()) - clock.worked_s
    seconds = clock.step_seconds
    return Fitted(
        fit_s=fit_s,
        step_s=sum(seconds) / len(seconds),
        longest_step_s=max(seconds),
        stall_s=clock.stall_s,
        processor_s=worked_s,
        state=live_state(module, trainer),
    )


def _way(
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
        tree = torch.load(max(root.glob("*.ckpt"), key=_step_of), weights_only=True)
    return _named(tree["state_dict"], tree["optimizer_states"][0])


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
