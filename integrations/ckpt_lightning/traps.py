"""What cannot be exact, or needs a hand: found at run time and told once, with what to do instead."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from ckpt_lightning.loops import callbacks_of
from ckpt_lightning.position import is_stateful, is_torchdata, loaders
from ckpt_lightning.texts import Teller

_SKIPPED = "on_train_epoch_start"


def warn_about_loaders(trainer: Trainer, teller: Teller, *, within_epochs: bool) -> None:
    """Called in on_train_start, when the loaders are known.

    Args:
        within_epochs: saves may come mid-epoch.
    """
    fetcher = trainer.fit_loop._data_fetcher
    for loader in loaders(trainer):
        # In its first epoch a worker's generators are new in any process.
        if not is_stateful(loader) and _keeps_workers(loader) and trainer.max_epochs != 1:
            teller.once(
                "a DataLoader with persistent_workers=True: the order of samples resumes exactly, random "
                "augmentation in its workers does not, from the second epoch on: the generators of new "
                "workers begin anew. Use ckpt_core.data.ResumableLoader, or persistent_workers=False, if you "
                "have any"
            )
        if not within_epochs:
            continue
        if is_torchdata(loader) and getattr(loader, "num_workers", None):
            teller.once(
                "StatefulDataLoader with workers: the order of samples resumes exactly, random augmentation "
                "in its workers does not. Use ckpt_core.data.ResumableLoader if you have any"
            )
        if is_stateful(loader) and fetcher is not None and fetcher.length is None:
            teller.once(
                "a training loader has a state but no length: Lightning fetches one batch ahead, so that its "
                "state is one batch ahead too, and a run that resumes mid-epoch loses that batch. Give it a "
                "length (__len__)"
            )


def _keeps_workers(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def warn_about_skipped_hooks(trainer: Trainer, module: LightningModule, teller: Teller) -> None:
    """Called in on_train_start of a run that resumes mid-epoch."""
    found: list[tuple[Any, str]] = []
    if is_overridden(_SKIPPED, module):
        found.append((module, "buffers or in on_save_checkpoint"))
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found += [(callback, "its state_dict()") for callback in callbacks if _begins_epochs(callback)]
    for owner, where in found:
        teller.once(
            f"{type(owner).__name__}.{_SKIPPED} is not called for the rest of this epoch: Lightning calls it "
            f"when an epoch begins, not when one is resumed. Keep what it sets up in {where}"
        )


def warn_about_finetuning(trainer: Trainer, teller: Teller) -> None:
    """Called in on_train_start of a run that resumes."""
    for callback in callbacks_of(trainer, BaseFinetuning):
        teller.once(
            f"{type(callback).__name__} freezes its layers again in a run that resumes, and unfreezes "
            f"them when the epoch for that begins: layers that were trained already are trained no more. "
            f"Set requires_grad in the module's on_train_start"
        )


def _begins_epochs(callback: Callback) -> bool:
    """Whether it has a hook of the user's, that nobody calls mid-epoch."""
    if isinstance(callback, StochasticWeightAveraging | GradientAccumulationScheduler):
        return False
    return is_of_user(callback, _SKIPPED)


def is_of_user(callback: Callback, hook: str) -> bool:
    """Whether this hook of a callback is neither Lightning's nor ours."""
    if hook in vars(callback):  # a LambdaCallback
        return True
    owner = next(cls for cls in type(callback).__mro__ if hook in vars(cls))
    return owner.__module__.partition(".")[0] not in ("lightning", "ckpt_lightning")


def begin_accumulation(trainer: Trainer, module: LightningModule) -> None:
    """Let schedules of accumulation set this epoch's, in a hook that nobody calls mid-epoch.

    Called in on_train_start of a run that resumes there.
    """
    for callback in callbacks_of(trainer, GradientAccumulationScheduler):
        callback.on_train_epoch_start(trainer, module)


def updating_batch_norm(trainer: Trainer, teller: Teller) -> bool:
    """Whether this is the extra epoch of StochasticWeightAveraging, which cannot be resumed."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    begins = epochs.started < epochs.ready and any(
        one._model_contains_batch_norm and trainer.current_epoch == one.swa_end + 1
        for one in callbacks_of(trainer, StochasticWeightAveraging)
    )
    if not begins and not getattr(trainer.fit_loop, "_skip_backward", False):
        return False
    teller.once(
        "no step is saved in the last epoch of StochasticWeightAveraging, which only updates BatchNorm: "
        "Lightning cannot resume it. A run that is killed in it goes on from the step before"
    )
    return True


def begin_averaging(trainer: Trainer, module: LightningModule, *, boundary: bool) -> None:
    """Let StochasticWeightAveraging make the scheduler again that it had. Called in on_train_start.

    It makes it in on_train_epoch_start, which Lightning does not call mid-epoch, and that steps it once,
    which changes the rates that have just been restored.
    """
    for callback in callbacks_of(trainer, StochasticWeightAveraging):
        within = callback.swa_start <= trainer.current_epoch <= callback.swa_end
        # Where the run never had one, it is made as the epoch begins, as in a run that did not stop.
        if not within or callback._scheduler_state is None:
            continue
        groups = [group for opt in trainer.optimizers for group in opt.param_groups]
        noted = [{key: group[key] for key in group if key != "params"} for group in groups]
        averaged = callback._latest_update_epoch
        if boundary:  # it averages as the epoch begins, behind what other callbacks do there
            callback._latest_update_epoch = trainer.current_epoch
        callback.on_train_epoch_start(trainer, module)
        if boundary:
            callback._latest_update_epoch = averaged
        for group, as_restored in zip(groups, noted, strict=True):
            group.update(as_restored)


class StepCounter:
    """Waits before every step of optimizers, and sees whether Lightning counts them.

    For manual optimization: `optimizers(use_pl_optimizer=False)` steps behind Lightning's back, with neither
    its hooks nor its count of steps.
    """

    def __init__(self, wait: Any, teller: Teller) -> None:
        self._wait = wait
        self._teller = teller
        self._handles: list[Any] = []
        self._steps = 0

    def watch(self, optimizers: list[Any]) -> None:
        """Begin. DeepSpeed's own are no optimizers of torch's, and step by Lightning's hooks alone."""
        torch_own = [opt for opt in optimizers if isinstance(opt, torch.optim.Optimizer)]
        self._handles = [opt.register_step_pre_hook(self._before_step) for opt in torch_own]

    def close(self) -> None:
        """End. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def check(self, trainer: Trainer) -> None:
        """Called after each batch."""
        if self._steps and trainer.global_step == 0:
            self._teller.once(
                "optimizers step, and Lightning's global_step stays 0, so nothing is saved before the end of "
                "training: use self.optimizers() in place of self.optimizers(use_pl_optimizer=False)"
            )

    def _before_step(self, *_: Any) -> None:
        self._steps += 1
        self._wait()
