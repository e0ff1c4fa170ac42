"""The ten traps of resuming in Lightning: each is handled, or told about at run time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, DistributedSampler

from ckpt_core import committed_steps, step_path
from ckpt_lightning import CheckpointWarning
from ckpt_lightning.capture import Owned
from ckpt_lightning.in_front import changes_in
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


class Stop(Exception):
    pass


def _wrong_steps(
    root: Path, tmp_path: Path, make: Any, loaders: Any, **options: Any
) -> dict[int, list[str]]:
    """Run once, saving every step; resume from each; the steps from which the end differs."""
    callbacks: Callable[[], list[Any]] = options.pop("callbacks", list)
    expected = ending(*fit(make, loaders, *callbacks(), **options))
    fit(make, loaders, *callbacks(), saver(root, every_n_steps=1), **options)
    wrong = {}
    for step in committed_steps(root):
        beside = saver(tmp_path / f"from-{step}", every_n_epochs=99, save_last=False)
        path = str(step_path(root, step))
        again = fit(make, loaders, *callbacks(), beside, seed=step, ckpt_path=path, **options)
        if found := differences(expected, ending(*again)):
            wrong[step] = found[:3]
    assert committed_steps(root)
    return wrong


class Counting(models.Net):
    """Counts the batches that it is given, in all processes of a run together."""

    batches: list[int] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(self.global_step)
        return super().training_step(batch, batch_idx)


def test_trap_1_a_run_by_steps_that_resumes_between_epochs_trains_no_batch_too_many(
    root: Path,
) -> None:
    Counting.batches.clear()
    options = {"max_epochs": -1, "max_steps": 15}
    fit(Counting, models.train_loader, saver(root), **options)
    Counting.batches.clear()
    path = str(step_path(root, 5))
    fit(Counting, models.train_loader, saver(root), ckpt_path=path, **options)
    assert Counting.batches == list(range(5, 15))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
def test_trap_2_a_sampler_that_goes_by_epochs_is_told_the_epoch_before_it_draws(
    root: Path, tmp_path: Path, kind: Any, workers: int
) -> None:
    def loader() -> Any:
        data = models.Noisy(augment=False)
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
        return kind(data, batch_size=models.BATCH_SIZE, sampler=sampler, num_workers=workers)

    def quiet() -> Any:
        return _wrong_steps(root, tmp_path, models.Net, loader, max_epochs=2)

    if kind is StatefulDataLoader and workers:
        with pytest.warns(CheckpointWarning, match="StatefulDataLoader with workers"):
            assert not quiet()
    else:
        assert not quiet()


class StatefulEndless(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_trap_3_a_loader_without_a_length_loses_no_batch(root: Path, tmp_path: Path) -> None:
    assert not _wrong_steps(root, tmp_path, models.Net, models.stream_loader, max_epochs=2)


@pytest.mark.parametrize("way", ["SIGTERM", "by hand"])
def test_trap_3_the_batch_ahead_is_fetched_again_as_it_was_also_behind_the_hooks_of_callbacks(
    root: Path, way: str
) -> None:
    class Ends(models.Numbered):
        def on_train_batch_start(self, *args: Any) -> None:
            if self.global_step == 6 and way == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_step == 7 and way == "by hand":
                self.trainer.save_checkpoint(root)
                raise Stop

    expected = ending(*fit(models.Numbered, models.stream_loader))
    with pytest.raises((Stop, SIGTERMException)):
        fit(Ends, models.stream_loader, saver(root, every_n_steps=100))
    assert committed_steps(root) == (7,)
    resumed = ending(*fit(models.Numbered, models.stream_loader, saver(root), seed=99))
    assert not differences(expected, resumed)


def test_trap_3_a_state_that_is_one_batch_ahead_is_told(root: Path) -> None:
    def loader() -> Any:
        return StatefulEndless(models.Stream(), batch_size=models.BATCH_SIZE)

    with pytest.warns(CheckpointWarning, match="has a state but no length"):
        fit(models.Net, loader, saver(root, every_n_steps=2), max_epochs=1)


def _stateful() -> Any:
    return StatefulDataLoader(models.Noisy(), batch_size=models.BATCH_SIZE, shuffle=True)


@pytest.mark.parametrize("step", [5, 10])
def test_traps_4_and_5_a_stateful_loader_at_the_end_of_an_epoch_begins_the_next_one(
    root: Path, tmp_path: Path, step: int
) -> None:
    expected = ending(*fit(models.Net, _stateful))
    fit(models.Net, _stateful, saver(root))
    path = str(step_path(root, step))
    again = fit(models.Net, _stateful, saver(tmp_path / "other"), seed=1, ckpt_path=path)
    assert not differences(expected, ending(*again))


def test_trap_5_random_augmentation_in_workers_of_a_stateful_loader_is_told(root: Path) -> None:
    def loader() -> Any:
        return StatefulDataLoader(models.Noisy(), batch_size=models.BATCH_SIZE, num_workers=1)

    with pytest.warns(CheckpointWarning, match=r"random augmentation in its workers does not"):
        fit(models.Net, loader, saver(root, every_n_steps=2), max_epochs=1)


@pytest.mark.parametrize("every", [{"every_n_epochs": 1}, {"every_n_steps": 2}])
def test_random_augmentation_in_workers_that_persist_is_told(root: Path, every: Any) -> None:
    def loader() -> Any:
        return models.train_loader(num_workers=1, persistent_workers=True)

    fit(models.Net, loader, saver(root / "one", **every), max_epochs=1)  # it is exact
    with pytest.warns(CheckpointWarning, match=r"persistent_workers=True.*augmentation in its wor"):
        fit(models.Net, loader, saver(root / "two", **every), max_epochs=2)


@pytest.mark.parametrize(("step", "done"), [(4, 2), (8, 3), (10, 3), (15, 4)])
def test_loaders_that_are_made_anew_are_so_in_the_same_epochs_of_a_resumed_run(
    root: Path, tmp_path: Path, step: int, done: int
) -> None:
    class Makes(models.MakesLoaders):
        def train_dataloader(self) -> Any:
            made.append(("train", self.trainer.current_epoch))
            return super().train_dataloader()

        def val_dataloader(self) -> Any:
            made.append(("val", self.trainer.current_epoch))
            return models.val_loader()

    def run(callback: Callback, **others: Any) -> Any:
        made.clear()
        options = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 6, **others}
        return ending(*fit(Makes, lambda: None, callback, **options))

    made: list[tuple[str, int]] = []
    expected = run(saver(root, every_n_steps=1))
    all_made = [(kind, epoch) for epoch in (0, 2, 4) for kind in ("train", "val")]
    assert made == all_made
    again = run(saver(tmp_path / "other"), seed=step, ckpt_path=str(step_path(root, step)))
    assert made[2:] == all_made[done:]
    assert not differences(expected, again)


def test_a_run_that_had_ended_makes_the_loaders_of_the_epochs_that_it_is_given(root: Path) -> None:
    options = {"reload_dataloaders_every_n_epochs": 2}

    def run(callback: Callback, epochs: int, seed: int = 7) -> Any:
        make = models.MakesLoaders
        return ending(*fit(make, lambda: None, callback, seed=seed, max_epochs=epochs, **options))

    expected = run(saver(root / "whole"), 4)
    run(saver(root / "parts"), 2)
    assert not differences(expected, run(saver(root / "parts"), 4, seed=9))


def test_trap_6_a_script_that_seeds_everything_does_not_see_the_first_order_again(
    root: Path, tmp_path: Path
) -> None:
    expected = ending(*fit(models.Net, models.train_loader, seed=7))
    fit(models.Net, models.train_loader, saver(root), seed=7)
    path = str(step_path(root, 5))
    again = fit(models.Net, models.train_loader, saver(tmp_path / "b"), seed=7, ckpt_path=path)
    assert not differences(expected, ending(*again))


@pytest.mark.parametrize("step", [3, 5, 8])
def test_trap_7_a_plateau_scheduler_is_stepped_at_the_end_of_a_resumed_epoch(
    root: Path, tmp_path: Path, step: int
) -> None:
    options = {"val": models.val_loader()}
    expected = ending(*fit(models.Plateau, models.train_loader, **options))
    fit(models.Plateau, models.train_loader, saver(root, every_n_steps=1), **options)
    path = str(step_path(root, step))
    beside = saver(tmp_path / "beside")
    again = ending(*fit(models.Plateau, models.train_loader, beside, ckpt_path=path, **options))
    assert again["schedulers"] == expected["schedulers"]


def test_trap_8_the_memory_of_a_distributed_tensor_is_that_of_its_local_part() -> None:
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        parameter = torch.nn.Parameter(whole)
        owned = Owned([torch.optim.SGD([parameter])])
        assert parameter.detach() in owned
        assert torch.ones(4, 2) not in owned
    finally:
        destroy_process_group()


def test_trap_9_a_hook_that_lightning_does_not_call_again_is_told(root: Path) -> None:
    class BeginsEpochs(models.Net):
        def on_train_epoch_start(self) -> None:
            pass

    fit(BeginsEpochs, models.train_loader, saver(root, every_n_steps=3), max_epochs=1)
    path = str(step_path(root, 3))
    with pytest.warns(CheckpointWarning, match=r"BeginsEpochs\.on_train_epoch_start is not called"):
        fit(BeginsEpochs, models.train_loader, saver(root), ckpt_path=path, max_epochs=1)


@pytest.mark.parametrize("kind", ["of a class", "given"])
def test_trap_9_such_a_hook_of_a_callback_is_told_too(root: Path, kind: str) -> None:
    class BeginsEpochs(Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            pass

    def begins() -> Callback:
        given = LambdaCallback(on_train_epoch_start=lambda *_: None)
        return given if kind == "given" else BeginsEpochs()

    name = "LambdaCallback" if kind == "given" else "BeginsEpochs"
    fit(models.Net, models.train_loader, saver(root, every_n_steps=3), begins(), max_epochs=1)
    path = str(step_path(root, 3))
    options = {"ckpt_path": path, "max_epochs": 1}
    with pytest.warns(CheckpointWarning, match=rf"{name}\.on_train_epoch_start is not.*state_dict"):
        fit(models.Net, models.train_loader, saver(root), begins(), **options)


def test_trap_9_callbacks_of_lightning_that_keep_nothing_there_are_not_told_of(root: Path) -> None:
    def quiet() -> list[Any]:
        return [LearningRateMonitor(), TQDMProgressBar()]

    def logger() -> Any:
        return CSVLogger(root.parent / "logs")

    options = {"max_epochs": 1, "enable_progress_bar": True, "log_every_n_steps": 1}
    every = saver(root, every_n_steps=3)
    fit(models.Net, models.train_loader, every, *quiet(), logger=logger(), **options)
    options["ckpt_path"] = str(step_path(root, 3))
    fit(models.Net, models.train_loader, saver(root), *quiet(), logger=logger(), **options)


@pytest.mark.parametrize("make", [models.Net, models.StepPlateau])
def test_trap_9_a_schedule_of_accumulation_holds_for_the_rest_of_a_resumed_epoch(
    root: Path, tmp_path: Path, make: Any
) -> None:
    def schedule() -> list[Any]:
        return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]

    options = {"callbacks": schedule, "val": models.val_loader(), "val_check_interval": 2}
    assert not _wrong_steps(root, tmp_path, make, models.train_loader, **options)


def test_layers_that_a_resumed_run_freezes_again_are_told(root: Path) -> None:
    class Tuned(models.Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)

        def on_train_end(self) -> None:
            trained.append(self.backbone.weight.requires_grad)

    def tuning() -> Callback:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1)

    trained: list[bool] = []
    fit(Tuned, models.train_loader, saver(root, every_n_steps=8), tuning(), max_epochs=3)
    options = {"ckpt_path": str(step_path(root, 8)), "max_epochs": 3}
    with pytest.warns(CheckpointWarning, match="BackboneFinetuning freezes its layers again"):
        fit(Tuned, models.train_loader, saver(root), tuning(), **options)
    assert trained == [True, False], "as the warning says"


def _swa() -> list[Any]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)]


@pytest.mark.parametrize(
    ("callback", "changes"),
    [
        (BackboneFinetuning(1), True),
        (LambdaCallback(on_train_epoch_start=lambda *_: None), True),
        (TQDMProgressBar(), False),
    ],
)
def test_what_may_change_weights_as_an_epoch_begins_waits_for_a_save_of_before(
    callback: Callback, changes: bool
) -> None:
    trainer = Trainer(callbacks=[callback], logger=False, enable_checkpointing=False)
    trainer.strategy._lightning_module = models.Net()
    assert changes_in("on_train_epoch_start", trainer) is changes


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
@pytest.mark.filterwarnings("ignore:SWA is initializing after swa_start")
def test_trap_10_no_step_is_saved_while_averaged_weights_get_their_batch_norm(
    root: Path, tmp_path: Path
) -> None:
    def make() -> LightningModule:
        return models.Net()

    with pytest.warns(CheckpointWarning, match="StochasticWeightAveraging, which only updates"):
        wrong = _wrong_steps(root, tmp_path, make, models.train_loader, callbacks=_swa)
    # From the last step nothing is trained any more; the averaging has dropped its scheduler by then.
    assert wrong.pop(16) == [".schedulers: length"] and not wrong
    # Step 15 is where that epoch begins, 16 where it has ended.
    assert committed_steps(root) == (*range(1, 15), 16)


def test_raw_optimizers_that_lightning_does_not_count_are_told(root: Path) -> None:
    class Raw(models.TwoManual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers(use_pl_optimizer=False):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    with pytest.warns(CheckpointWarning, match="global_step stays 0"):
        fit(Raw, models.train_loader, saver(root, every_n_steps=2), max_epochs=1)
