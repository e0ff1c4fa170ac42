"""One run of Trainer, with one of the ways to save, under the clock. Needs torch and Transformers."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckpt_core.bench.contenders import OURS, State
from ckpt_core.bench.fit_clock import Begun, FitClock, Fitted
from ckpt_core.bench.fits import BASE
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.window import Window
from ckpt_core.bench.workloads import token_batches
from ckpt_core.options import Options

_HOOKS = ("on_step_begin", "on_step_end", "on_epoch_end")
"""Of our callback, in training; where it saves, both ways do it in `_save_checkpoint`."""


class Words(Dataset[dict[str, torch.Tensor]]):
    """Random batches, a few of them over and over; longer than any fit, so that none ends an epoch."""

    def __init__(self, size: dict[str, Any], steps: int) -> None:
        self._rows = torch.cat(token_batches(size, torch.Generator().manual_seed(0)))[:, :-1]
        self._length: int = 2 * steps * size["batch"]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self._rows[index % len(self._rows)]
        return {"input_ids": words, "labels": words}


class Clock(TrainerCallback):
    """Tells a clock when steps begin, when the last one is over, and what an update waits for."""

    def __init__(self, clock: FitClock) -> None:
        self._clock = clock
        self._steps = clock.window.lead + clock.window.steps
        self._asked = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first that a step does."""
        if state.global_step == self._steps:
            self._clock.window_ends()
        elif state.global_step < self._steps:
            self._clock.step_begins(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Right before the update, and what holds it up."""
        self._asked = time.perf_counter()

    def updates(self, *_: Any) -> None:
        """The update begins: all that holds it up is over."""
        if self._asked:
            self._clock.add(time.perf_counter() - self._asked)
        self._asked = 0.0

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """After the first one every hook that waits is there: ours comes behind them."""
        if state.global_step == 1:
            optimizer.optimizer.register_step_pre_hook(self.updates)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where no step follows on the window."""
        self._clock.window_ends()


class Ends(TrainerCallback):
    """Ends a fit at its first step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first one."""
        raise Begun


def model(size: dict[str, Any]) -> Any:
    """A GPT-2, whose words and scores are apart, as in the models of the other suites."""
    torch.manual_seed(0)
    width = size["width"]
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size["vocabulary"],
            n_positions=size["tokens"],
            n_embd=width,
            n_layer=size["layers"],
            n_head=max(1, width // 64),
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def fit(
    name: str,
    model: Any,
    *,
    size: dict[str, Any],
    window: Window,
    root: Path,
    staging_bytes: int | None = None,
) -> Fitted:
    """As `Fitting` has it."""
    # A save at every step has the next one to hold up, also the last one under the clock.
    steps = window.lead + window.steps + (window.every == 1)
    clock = FitClock(window)
    savers = _savers(name, root, staging_bytes)
    told = Clock(clock)
    trainer = _trainer(
        name, model, [told, *savers], size=size, steps=steps, root=root, window=window
    )
    for saver in savers:
        clock.watch(saver, _HOOKS)
    clock.watch(trainer, ["_save_checkpoint"])
    began = time.perf_counter()
    trainer.train()
    return clock.found(
        fit_s=time.perf_counter() - began,
        processor_s=processor_s(os.getpid()),
        state=_named(trainer.model.state_dict(), trainer.optimizer.state_dict()),  # type: ignore[union-attr]
    )


def resume(name: str, model: Any, *, size: dict[str, Any], root: Path) -> float:
    """As `Fitting` has it."""
    savers = _savers(name, root, None)
    window = Window(every=2, lead=0, steps=4)
    trainer = _trainer(
        name, model, [Ends(), *savers], size=size, steps=1000, root=root, window=window
    )
    began = time.perf_counter()
    with contextlib.suppress(Begun):
        trainer.train(resume_from_checkpoint=True)
    return time.perf_counter() - began


def saved_state(name: str, root: Path) -> State:
    """As `Fitting` has it."""
    if name == OURS:
        from ckpt_core import load

        tree = load(root / "ckpts")
        return _named(tree["model"], tree["optimizer"])
    newest = max((root / "out").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    optimizer = torch.load(newest / "optimizer.pt", weights_only=True)
    return _named(load_file(newest / "model.safetensors"), optimizer)


def _savers(name: str, root: Path, staging_bytes: int | None) -> list[TrainerCallback]:
    if name != OURS:
        return []
    from ckpt_transformers import AsyncCheckpoint  # by this way alone: the others have none of it

    options = Options(staging_bytes=staging_bytes)
    return [AsyncCheckpoint(root / "ckpts", on_error="raise", options=options)]


def _trainer(
    name: str,
    model: Any,
    callbacks: list[TrainerCallback],
    *,
    size: dict[str, Any],
    steps: int,
    root: Path,
    window: Window,
) -> Trainer:
    args = TrainingArguments(
        str(root / "out"),
        max_steps=steps,
        per_device_train_batch_size=size["batch"],
        save_strategy="no" if name == BASE else "steps",
        save_steps=window.every,
        save_total_limit=1,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ignore_data_skip=True,
    )
    return Trainer(model, args, train_dataset=Words(size, steps), callbacks=callbacks)


def _named(weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> State:
    state: State = {
        f"model.{name}": weights[name].detach().contiguous() for name in sorted(weights)
    }
    for index, values in optimizer["state"].items():
        state |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    return state
