"""Tiny jobs of a real Trainer, and how they end. Models are made on the spot; no hub is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckpt_core import Options
from ckpt_transformers import AsyncCheckpoint

SAMPLES, WORDS = 22, 12
SMALL = Options(
    keep_last=None,
    timeout=60,
    eager_leaf_bytes=0,
    debug_barrier=True,
    chunk_bytes="64KiB",
    staging_bytes="4MiB",
    writers=2,
    readers=2,
)


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that their number makes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number >= SAMPLES:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(0, 64, (WORDS,), generator=generator)
        return {"input_ids": words, "labels": words}


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """The same one after another, and nobody knows how many."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(Words()[number] for number in range(SAMPLES))


def plain(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches that draw nothing: workers may make them."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def masked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches with words left out at random, as for masked language models: fetching them draws numbers."""
    words = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(words.shape) < 0.15
    return {"input_ids": words.masked_fill(hidden, 0), "labels": words}


class DiesAt(TrainerCallback):
    """Ends a run in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def gpt(seed: int = 0) -> Any:
    """Two layers, with dropout."""
    torch.manual_seed(seed)
    size: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**size, **ends, n_layer=2, n_head=2))


class OwnConfig(PreTrainedConfig):
    """Of a kind that `AutoConfig` does not know."""

    model_type = "ckpt-own"


class Own(PreTrainedModel):
    """A class of one's own, which guesses the next word from one alone."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.guess = torch.nn.Embedding(64, 64)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean loss."""
        logits = self.guess(input_ids[:, :-1]).transpose(1, 2)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:])}


def own(seed: int = 0) -> Own:
    """One with weights."""
    torch.manual_seed(seed)
    return Own(OwnConfig())


def trainer_of(
    folder: Path,
    *callbacks: TrainerCallback,
    model: Any = None,
    saver: Any = None,
    collator: Any = masked,
    optimizer: Any = None,
    data: Any = None,
    **arguments: Any,
) -> Trainer:
    """A quiet Trainer that saves into folder/ckpts; 18 steps of two batches each unless told otherwise."""
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_steps": 2,
        "logging_steps": 3,
        "seed": 3,
    }
    saver = saver or AsyncCheckpoint(folder / "ckpts", options=SMALL)
    model = gpt() if model is None else model
    return Trainer(
        model=model,
        args=TrainingArguments(**(given | arguments)),
        train_dataset=Words() if data is None else data,
        eval_dataset=Words(),
        data_collator=collator,
        callbacks=[saver, *callbacks],
        optimizers=(None if optimizer is None else optimizer(model), None),
    )


def ending(trainer: Trainer) -> dict[str, Any]:
    """Everything that must be equal when two runs are."""
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    log = [_without_clocks(row) for row in trainer.state.log_history]
    return {
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "model": fingerprint(model.state_dict()),
        "optimizer": fingerprint(optimizer.state_dict()),
        "scheduler": repr(trainer.lr_scheduler.state_dict()),  # type: ignore[union-attr]
        "rng": fingerprint(torch.get_rng_state()),
        "log": [row for row in log if "train_loss" not in row],
        "best": trainer.state.best_metric,
        "flos": trainer.state.total_flos,
    }


def run(folder: Path, *callbacks: TrainerCallback, resume: Any = True, **more: Any) -> Any:
    """Train to the end: how it ended."""
    trainer = trainer_of(folder, *callbacks, **more)
    trainer.train(resume_from_checkpoint=resume)
    return ending(trainer)


def run_stock(folder: Path, resume: Any = None, **more: Any) -> Any:
    """The same by Trainer alone, which saves into folder/out."""
    trainer = trainer_of(folder, **more)
    trainer.pop_callback(AsyncCheckpoint)
    for name in [name for name in vars(trainer) if callable(getattr(Trainer, name, None))]:
        delattr(trainer, name)  # what the callback has put there
    trainer.train(resume_from_checkpoint=resume)
    return ending(trainer)


def fingerprint(value: Any) -> str:
    """SHA-256 of all that is in it."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name in value:
            digest.update(repr(name).encode())
            _feed(digest, value[name])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, DTensor):
        digest.update(value.full_tensor().numpy().tobytes())
    elif isinstance(value, Tensor):
        digest.update(value.detach().contiguous().numpy().tobytes())
    else:
        digest.update(repr(value).encode())


def _without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in row if "runtime" not in key and "per_second" not in key}
