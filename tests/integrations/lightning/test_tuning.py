"""Runs that look for a learning rate or a batch size first: they resume as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LambdaCallback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from ckpt_core import committed_steps, step_path
from ckpt_core.data import ResumableLoader
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, saver, trainer_of

BATCHES = {"max_trials": 1, "steps_per_trial": 2, "init_val": models.BATCH_SIZE // 2}
RATES = {"min_lr": 1e-4, "max_lr": 0.1}  # and the fourteenth batch is the last


class Killed(Exception):
    pass


class Tunable(models.Net):
    """Has a rate and a batch size to be found, and its own loaders."""

    def __init__(self, workers: int, resumable: bool) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.01, models.BATCH_SIZE
        self.workers, self.resumable = workers, resumable

    def train_dataloader(self) -> Any:
        options = {"batch_size": self.batch_size, "shuffle": True, "num_workers": self.workers}
        if self.resumable:
            return ResumableLoader(models.Noisy(), seed=3, **options)
        return DataLoader(models.Noisy(), **options)

    def val_dataloader(self) -> Any:
        return models.val_loader()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def _tune_rate(trainer: Any, module: Any) -> None:
    Tuner(trainer).lr_find(module, num_training=14, **RATES)


def _tune_batches(trainer: Any, module: Any) -> None:
    Tuner(trainer).scale_batch_size(module, **BATCHES)


WAYS: dict[str, tuple[Callable[[Any, Any], None] | None, Callable[[], list[Any]]]] = {
    "Tuner.lr_find": (_tune_rate, list),
    "Tuner.scale_batch_size": (_tune_batches, list),
    "LearningRateFinder": (None, lambda: [LearningRateFinder(num_training_steps=14, **RATES)]),
    "BatchSizeFinder": (None, lambda: [BatchSizeFinder(**BATCHES)]),
}


@pytest.mark.parametrize(
    ("way", "workers", "resumable", "kill_at"),
    [
        ("Tuner.lr_find", 0, False, 7),
        ("Tuner.scale_batch_size", 0, False, 7),
        ("LearningRateFinder", 0, False, 7),
        ("LearningRateFinder", 2, False, 3),  # workers that a finder's iterator has started
        ("LearningRateFinder", 0, True, 7),
        ("BatchSizeFinder", 0, False, 7),
        ("BatchSizeFinder", 0, True, 3),
    ],
)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_run_that_searches_first_resumes_exactly(
    root: Path, tmp_path: Path, way: str, workers: int, resumable: bool, kill_at: int
) -> None:
    tune, finders = WAYS[way]
    (tmp_path / "files").mkdir()

    def run(root: Path, *others: Any, seed: int = 7, ckpt_path: str | None = None) -> Any:
        torch.manual_seed(seed)
        module = Tunable(workers, resumable)
        callbacks = (*finders(), *others, saver(root, every_n_steps=1))
        trainer = trainer_of(*callbacks, default_root_dir=tmp_path / "files")
        if tune is not None:
            held = committed_steps(root)
            tune(trainer, module)
            assert committed_steps(root) == held
        trainer.fit(module, ckpt_path=ckpt_path)
        return {**ending(trainer, module), "batch_size": module.batch_size}

    def kill(trainer: Any, *_: Any) -> None:
        if trainer.global_step == kill_at:
            raise Killed

    undisturbed = run(tmp_path / "undisturbed")
    with pytest.raises(Killed):
        run(root, LambdaCallback(on_train_batch_start=kill))
    path = str(step_path(root, kill_at))
    assert not differences(undisturbed, run(tmp_path / "named", seed=9, ckpt_path=path))
    assert not differences(undisturbed, run(root, seed=9))
