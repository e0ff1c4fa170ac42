"""From every step of 3 epochs of 5 batches, a fresh trainer ends bit for bit as a run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Subset, default_collate

from ckpt_core import committed_steps, step_path
from ckpt_core.data import ResumableLoader
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver


@dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        steps: how many optimizer steps it has; all of them but the last must have been saved.
        options: of the Trainer.
        stride: of the saved steps, how many there are from one that is tried to the next.
        passed_over: some batches are; Lightning's sum of batches, by which nothing goes, lacks them.
    """

    make: Callable[[], LightningModule] = models.Net
    steps: int = 15
    loaders: Callable[[], Any] = models.train_loader
    val: bool = False
    val_loader: Callable[[], Any] = models.val_loader
    callbacks: Callable[[], list[Any]] = list
    options: dict[str, Any] = field(default_factory=dict)
    stride: int = 1
    passed_over: bool = False


def _resumable() -> Any:
    return ResumableLoader(models.Noisy(), batch_size=models.BATCH_SIZE, shuffle=True, seed=3)


def _stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(models.Noisy(), batch_size=models.BATCH_SIZE, shuffle=True)


def _none() -> None:
    """The module makes them."""


def _own_generator() -> Any:
    return models.train_loader(generator=torch.Generator().manual_seed(5))


def _pair(kind: Callable[..., Any], mode: Any) -> Callable[[], Any]:
    """Loaders of 2 and of 5 batches."""

    def made() -> Any:
        shorter, longer = Subset(models.Noisy(), range(8)), models.Noisy()
        options = {"batch_size": models.BATCH_SIZE, "shuffle": True}
        both = {"shorter": kind(shorter, **options), "longer": kind(longer, **options)}
        return CombinedLoader(both, mode)

    return made


def _val_generator() -> Any:
    own = torch.Generator().manual_seed(3)
    return DataLoader(models.Noisy(augment=False), batch_size=4, shuffle=True, generator=own)


def _some_none() -> Any:
    """One or two of five batches are None."""

    def collated(samples: Any) -> Any:
        broken = any(float(y) < -4.2 for _, y in samples)
        return None if broken else default_collate(samples)

    return models.train_loader(collate_fn=collated)


def _averaging() -> list[Any]:
    return [callbacks.EMAWeightAveraging(decay=0.8)]


class ChangesAsItBegins(callbacks.Callback):
    """What it does as an epoch or a batch begins, it must not have done already in a run that resumes."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._change(trainer, module)

    def _change(self, trainer: Any, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9 + 0.1 * torch.rand(()))


class ChangesBeforeBatches(ChangesAsItBegins):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._change(trainer, module)


MID = {"val_check_interval": 2}
BY_STEPS = {"max_epochs": None, "max_steps": 15}
CASES = {
    "plain loader": Case(),
    "plain loader, two workers": Case(loaders=lambda: models.train_loader(num_workers=2), stride=4),
    "plain loader with a generator": Case(loaders=_own_generator),
    "loader without a length, validation in the middle": Case(
        models.Numbered, loaders=models.stream_loader, val=True, options=MID
    ),
    "loader without a length, own on_train_batch_end, validation in the middle": Case(
        models.OwnHook, loaders=models.stream_loader, val=True, options=MID
    ),
    "resumable loader": Case(loaders=_resumable),
    "stateful loader": Case(loaders=_stateful),
    "two loaders, one begins anew": Case(models.Pair, loaders=_pair(DataLoader, "max_size_cycle")),
    "two resumable loaders, one begins anew": Case(
        models.Pair, loaders=_pair(ResumableLoader, "max_size_cycle")
    ),
    "two resumable loaders, one ends": Case(
        models.Pair, loaders=_pair(ResumableLoader, "max_size")
    ),
    "two resumable loaders, both end": Case(
        models.Pair, steps=6, loaders=_pair(ResumableLoader, "min_size")
    ),
    "loaders made anew at each epoch": Case(
        models.MakesLoaders,
        steps=12,
        loaders=_none,
        options={"reload_dataloaders_every_n_epochs": 1},
    ),
    "loaders made anew at each second epoch": Case(
        models.MakesLoaders,
        20,
        _none,
        options={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
    ),
    "validation at the end": Case(val=True),
    "validation with a generator": Case(models.Weighing, val=True, val_loader=_val_generator),
    "validation with a generator at each second epoch": Case(
        models.Weighing,
        steps=20,
        val=True,
        val_loader=_val_generator,
        options={"check_val_every_n_epoch": 2, "max_epochs": 4},
        stride=3,
    ),
    "validation in the middle": Case(val=True, options=MID),
    "by steps": Case(options=BY_STEPS),
    "by steps, validation at the end": Case(val=True, options=BY_STEPS),
    "by steps, validation in the middle": Case(val=True, options=BY_STEPS | MID),
    "accumulation": Case(steps=9, options={"accumulate_grad_batches": 2}),
    "accumulation, validation in the middle": Case(
        steps=9, val=True, options={"accumulate_grad_batches": 2, "val_check_interval": 1}
    ),
    "mixed precision and clipping": Case(
        options={"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    ),
    "double precision": Case(options={"precision": "64-true"}, stride=7),
    "averaged weights": Case(callbacks=_averaging),
    "averaged weights, validation in the middle": Case(callbacks=_averaging, val=True, options=MID),
    "averaged weights, double precision": Case(
        callbacks=_averaging, options={"precision": "64-true"}, stride=4
    ),
    "LBFGS": Case(make=models.Lbfgs),
    "manual optimization": Case(make=models.TwoManual, steps=24),
    "manual optimization that adds gradients up": Case(make=models.AddsUpByHand, steps=18),
    "weights that an optimizer swaps": Case(make=models.ScheduleFree, val=True, options=MID),
    "plateau": Case(make=models.Plateau, val=True),
    "plateau, validation in the middle": Case(make=models.Plateau, val=True, options=MID),
    "plateau of steps, validation in the middle": Case(
        make=models.StepPlateau, val=True, options=MID
    ),
    "plateau of steps, metric of training": Case(make=models.TrainingPlateau, stride=2),
    "own on_train_batch_end": Case(make=models.OwnHook),
    "own on_train_batch_end, validation in the middle": Case(
        make=models.OwnHook, val=True, options=MID
    ),
    "own on_train_batch_end that draws": Case(
        models.DrawsInHook, 9, options={"accumulate_grad_batches": 2}
    ),
    "own on_train_batch_end that draws, batches that are None": Case(
        models.DrawsInHook, 9, _some_none, passed_over=True, stride=2
    ),
    "own on_train_batch_end that draws, loader without a length, by steps": Case(
        models.DrawsInHook, loaders=models.stream_loader, val=True, options=MID | BY_STEPS, stride=2
    ),
    "own on_train_batch_end that draws, two loaders, one begins anew": Case(
        models.DrawsInHookOfPair, loaders=_pair(DataLoader, "max_size_cycle"), stride=2
    ),
    "own on_validation_end, validation in the middle": Case(
        models.SwapsInHook, val=True, options=MID
    ),
    "own on_validation_end, validation at the end": Case(models.SwapsInHook, val=True, stride=4),
    "own on_validation_end, accumulation, validation in the middle": Case(
        models.SwapsInHook,
        9,
        val=True,
        options={"accumulate_grad_batches": 2, "val_check_interval": 1},
    ),
    "own on_validation_end, loader without a length, by steps": Case(
        models.SwapsInHook, loaders=models.stream_loader, val=True, options=MID | BY_STEPS, stride=2
    ),
    "own on_validation_end, batches that are None": Case(
        models.SwapsInHook, 9, _some_none, val=True, options=MID, stride=2, passed_over=True
    ),
    "own on_validation_model_train, plateau of steps": Case(
        models.SwapsForPlateau, val=True, options=MID
    ),
    "own on_train_epoch_start that draws": Case(models.DrawsAsEpochsBegin),
    "own on_train_epoch_start that draws, two workers": Case(
        models.DrawsAsEpochsBegin, loaders=lambda: models.train_loader(num_workers=2), stride=4
    ),
    "own on_train_epoch_start that draws, loader with a generator": Case(
        models.DrawsAsEpochsBegin, loaders=_own_generator, stride=2
    ),
    "own on_train_epoch_start that draws, loader without a length": Case(
        models.DrawsAsEpochsBegin, loaders=models.stream_loader, val=True, options=MID
    ),
    "own on_train_epoch_start that draws, stateful loader": Case(
        models.DrawsAsEpochsBegin, loaders=_stateful, stride=2
    ),
    "a callback's on_train_epoch_start": Case(callbacks=lambda: [ChangesAsItBegins()]),
    "a callback's on_train_epoch_start, own on_train_batch_end": Case(
        models.OwnHook, callbacks=lambda: [ChangesAsItBegins()], val=True, options=MID, stride=2
    ),
    "a callback's on_train_batch_start, own on_train_batch_end": Case(
        models.OwnHook, callbacks=lambda: [ChangesBeforeBatches()], stride=2
    ),
    "epochs that the module leaves": Case(
        models.LeavesEpochs, 13, options={"max_epochs": 4}, stride=2, passed_over=True
    ),
    "epochs that the module leaves, accumulation, validation at the end": Case(
        models.LeavesEpochs,
        7,
        val=True,
        options={"accumulate_grad_batches": 2, "max_epochs": 4},
        passed_over=True,
    ),
    "batches that are None, validation in the middle": Case(
        models.Numbered, 9, _some_none, val=True, options=MID, stride=2, passed_over=True
    ),
    "batches that are None, own on_train_batch_end": Case(
        models.OwnHook, 10, _some_none, passed_over=True
    ),
    "batches that are None, accumulation": Case(
        models.Numbered,
        4,
        _some_none,
        options={"accumulate_grad_batches": 2},
        passed_over=True,
    ),
}
if not hasattr(callbacks, "EMAWeightAveraging"):  # new in Lightning 2.6
    CASES = {name: case for name, case in CASES.items() if "averaged" not in name}


def _run(case: Case, *others: Any, **options: Any) -> dict[str, Any]:
    val = case.val_loader() if case.val else None
    around = (*case.callbacks(), *others)
    trainer, module = fit(case.make, case.loaders, *around, val=val, **case.options, **options)
    found = ending(trainer, module)
    if case.passed_over:
        del found["batches"]
    return found


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.filterwarnings("ignore:DrawsAsEpochsBegin.on_train_epoch_start is not called")
@pytest.mark.filterwarnings("ignore:Changes.*on_train_epoch_start is not called")
@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_that_resumes_from_any_step_ends_as_if_it_had_never_stopped(
    case: Case, root: Path, tmp_path: Path
) -> None:
    never_saved = _run(case)
    assert never_saved["global_step"] == case.steps
    assert not differences(never_saved, _run(case, saver(root, every_n_steps=1)))
    saved = committed_steps(root)
    # Manual optimization with several optimizers passes over some numbers.
    assert saved[-1] == case.steps and len(saved) >= case.steps * 5 // 8
    wrong = {}
    for step in saved[:: case.stride]:
        beside = saver(tmp_path / f"from-{step}", every_n_epochs=100, save_last=False)
        resumed = _run(case, beside, seed=100 + step, ckpt_path=str(step_path(root, step)))
        if found := differences(never_saved, resumed):
            wrong[step] = found[:4]
    assert not wrong


def test_gradients_added_up_by_hand_at_the_end_of_an_epoch_are_there_when_the_next_one_begins(
    root: Path, tmp_path: Path
) -> None:
    case = Case(make=models.OneByHand, options={"max_epochs": 4})
    undisturbed = _run(case)
    _run(case, saver(root, every_n_epochs=1))
    assert committed_steps(root) == (1, 2, 3, 4)
    for step in (1, 2, 3):
        beside = saver(tmp_path / f"from-{step}", every_n_epochs=100, save_last=False)
        resumed = _run(case, beside, seed=step, ckpt_path=str(step_path(root, step)))
        assert not differences(undisturbed, resumed), step
