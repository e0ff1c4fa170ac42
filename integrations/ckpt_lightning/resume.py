"""Which step training goes on from, and whether it is one of this model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckpt_core
from ckpt_core import (
    Checkpointer,
    ConfigError,
    CorruptCheckpoint,
    RestoreError,
    RngState,
    StateMismatch,
    committed_steps,
    step_path,
)
from ckpt_lightning.capture import EXTRAS
from ckpt_lightning.loops import (
    AVERAGING,
    callbacks_of,
    ends_here,
    swapping_optimizers,
    validation_follows,
)
from ckpt_lightning.texts import tell
from ckpt_lightning.traps import begin_accumulation

_MOST_SHOWN = 6


def load(
    path: str | os.PathLike[str], *, trusted: bool = False, rank: int | None = None
) -> dict[str, Any]:
    """A checkpoint as Lightning's own dict (`state_dict`, `hyper_parameters`, ...), with CPU tensors.

    The way for code without a trainer, in place of `LightningModule.load_from_checkpoint(path)`, which opens
    a file by itself and asks nobody. Takes no lock; works beside a run that is still training.

    Args:
        path: a step, or a root: then its newest step. A directory, or the URL of an object store.
        trusted: allow hyper-parameters that could run code when they are loaded.
        rank: of several ranks that saved it, the one whose own values are taken (generators, buffers); if
            the step has none of it, or for None: those of the first.

    Raises:
        NotCommitted: there is no step, or it is a save that was never committed.
        CorruptCheckpoint, UntrustedData, UnknownFormat, RestoreError: as `ckpt_core.load`.
    """
    try:
        tree = ckpt_core.load(path, trusted=trusted, rank=rank)
    except RestoreError as exc:
        if rank is None or type(exc) is not RestoreError or exc.rank != rank:
            raise
        tree = ckpt_core.load(path, trusted=trusted)
    return checked_tree(tree, path)


def checked_tree(tree: Any, path: object) -> dict[str, Any]:
    """The tree of a step, if Lightning's states are in it.

    Raises:
        ConfigError: it was not saved by Lightning.
    """
    if not isinstance(tree, dict) or "state_dict" not in tree:
        raise ConfigError(
            f"{path} was not saved by Lightning: it has no 'state_dict'. Load it with ckpt_core.load, or "
            f"restore it with the Checkpointer that wrote it"
        )
    return tree


def load_from_levels(
    checkpointer: Checkpointer, path: Path, *, trusted: bool
) -> dict[str, Any] | None:
    """A step that the root of `checkpointer` has not got, from a further level; None if it is no step of it.

    Called on every rank.

    Raises:
        RestoreError: as `Checkpointer.restore`.
    """
    digits = path.name.removeprefix("step-")
    if not digits.isdecimal() or path != step_path(checkpointer.root, int(digits)):
        return None
    found = checkpointer.restore(None, step=int(digits), trusted=trusted)
    return None if found is None else checked_tree(found.state, found.path)


def refuse_steps(root: Path, steps: tuple[int, ...]) -> None:
    """Raises ConfigError when a root that should be empty holds steps."""
    if steps:
        held = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        raise ConfigError(
            f"resume='never', and {root} holds {held} (newest {steps[-1]}): they would "
            f"be mixed with those of this run. Choose another root, delete this one, or pass "
            f"resume='auto' to go on"
        )


def resume_newest(trainer: Trainer, module: LightningModule, root: Path) -> int | None:
    """Let Lightning load the newest step that is whole; the step, or None when there is none.

    Called in setup(). A corrupt step is passed over, with a warning, for the next older one.

    Raises:
        CorruptCheckpoint: there are steps, and none is whole.
        StateMismatch: the step is of another model.
    """
    connector: Any = trainer._checkpoint_connector
    first_error: CorruptCheckpoint | None = None
    for step in reversed(committed_steps(root)):
        path = step_path(root, step)
        try:
            # Not a public name. The only one who calls it later passes None, which changes nothing.
            connector.resume_start(str(path))
        except CorruptCheckpoint as exc:
            first_error = first_error or exc
            tell(f"step {step} is corrupt, going back to the next older one: {exc}")
            continue
        check_model(module, connector._loaded_checkpoint, path)
        return step
    if first_error is not None:
        raise first_error
    return None


def check_model(module: LightningModule, checkpoint: dict[str, Any], path: Path) -> None:
    """Raises StateMismatch when a checkpoint is of another model, before anything is changed."""
    may_change = ("configure_model", "on_load_checkpoint")
    if any(is_overridden(name, module) for name in may_change) or not module.strict_loading:
        return
    saved, live = checkpoint["state_dict"], module.state_dict()
    problems = [f"{name} is missing" for name in live if name not in saved]
    problems += [f"{name} is not in this model" for name in saved if name not in live]
    problems += [
        f"{name} is {tuple(saved[name].shape)}, here {tuple(value.shape)}"
        for name, value in live.items()
        if hasattr(value, "shape") and name in saved and saved[name].shape != value.shape
    ]
    if problems:
        shown = "; ".join(problems[:_MOST_SHOWN]) + ("; ..." if len(problems) > _MOST_SHOWN else "")
        raise StateMismatch(
            f"{path} was saved by another model ({shown}). If this is a new run, give it a root of its own; "
            f"to start from those weights, load them in your script. Nothing was changed",
            problems=problems,
            path=path,
        )


def of_later_fit(trainer: Trainer, saved: dict[str, Any]) -> bool:
    """Whether a step lies behind the end of the fit that has loaded it, and so trained nothing.

    A program that calls `fit` several times has saved it in a later one, of which much is not in memory then.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    begun = epochs.processed + (not saved["boundary"])
    limits = (trainer.max_epochs, begun), (trainer.max_steps, trainer.global_step)
    return any(limit not in (None, -1) and limit < reached for limit, reached in limits)


def let_load(trainer: Trainer) -> None:
    """Let Lightning load the loops of a step that lies behind the end of this fit, which it would refuse.

    Called behind what finders load, and before Lightning loads loops, which takes it away again. The fit then
    trains nothing, and a later one goes on from that step.
    """
    connector: Any = trainer._checkpoint_connector
    loop, load_loops = trainer.fit_loop, type(connector).restore_loops

    def restore_loops() -> None:
        del connector.restore_loops
        limit = loop.max_epochs
        if not trainer.ckpt_path:  # a step that was asked for is refused as ever
            loop.max_epochs = -1
        try:
            load_loops(connector)
        finally:
            loop.max_epochs = limit

    connector.restore_loops = restore_loops


def trained_nothing(trainer: Trainer, saved: dict[str, Any]) -> bool:
    """Put back what no training has; whether the step is of a later fit of the program.

    Called in teardown() of a fit that had ended already.
    """
    RngState().load_state_dict(saved["rng"])
    later = not trainer.ckpt_path and of_later_fit(trainer, saved)
    if later:
        rank_zero_info(
            f"step {trainer.global_step} lies behind the end of this fit: nothing was trained"
        )
    if saved["boundary"]:
        begin_epoch(trainer)
    elif not later and ends_here(trainer):
        _end_epoch(trainer, saved)
    return later


def announce(trainer: Trainer, checkpoint_extras: dict[str, Any], path: object) -> None:
    """The one log line that says where training goes on."""
    where = "between two epochs" if checkpoint_extras["boundary"] else "mid-epoch"
    rank_zero_info(
        f"resumed from step {trainer.global_step} (epoch {trainer.current_epoch}, {where}) of {path}"
    )


def load_in_double(trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """With precision "64-true": load the weights as they were saved. Called in on_load_checkpoint.

    Lightning has loaded them into a module that is still in float32, and makes it double only afterwards.
    """
    double = isinstance(trainer.precision_plugin, DoublePrecision)
    if double and not trainer.strategy.restore_checkpoint_after_setup:
        module.double()
        whole = {**checkpoint, "state_dict": _weights(trainer, checkpoint)}
        trainer.strategy.load_model_state_dict(whole, strict=module.strict_loading)


def _weights(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Those that this run goes on with: with WeightAveraging, a fit trains others than the average."""
    averages = trainer.state.fn == TrainerFn.FITTING and callbacks_of(trainer, AVERAGING)
    trained: dict[str, Any] | None = checkpoint.get("current_model_state") if averages else None
    return checkpoint["state_dict"] if trained is None else trained


def own_buffers(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's, where nobody keeps those of the ranks equal. Called in on_load_checkpoint."""
    module = trainer.lightning_module
    if module.automatic_optimization or not isinstance(trainer.strategy, DDPStrategy):
        return {}
    saved = _weights(trainer, checkpoint)
    return {name: saved[name] for name, _ in module.named_buffers() if name in saved}


def put_back(trainer: Trainer, module: LightningModule, saved: dict[str, Any]) -> None:
    """What Lightning does not restore, but for generators. Called in on_train_start."""
    if not saved["boundary"]:
        begin_accumulation(trainer, module)  # schedulers that are owed a step ask for it
        for optimizer in swapping_optimizers(trainer):
            optimizer.train()  # saved behind a validation, before the module's own hook
    model = trainer.strategy.model
    if saved["buffers"] and isinstance(model, DistributedDataParallel):
        # Made equal when it was made, and in its first batch; with manual optimization, in no later one.
        for name, value in saved["buffers"].items():
            module.get_buffer(name).copy_(value)
        model.require_forward_param_sync = False
    trainer._logger_connector._callback_metrics.update(saved["metrics"])
    parameters = dict(module.named_parameters())
    for name, gradient in saved["gradients"].items():
        parameter = parameters[name]
        parameter.grad = _distributed_like(parameter, gradient.to(parameter.device))
    loop = trainer.fit_loop.epoch_loop
    follows = not saved["boundary"] and validation_follows(trainer)
    if saved["owed"] == "batch" or (saved["owed"] == "validation" and not follows):
        # Lightning steps them after the hooks of a batch, and goes on with the next batch when it resumes.
        loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    elif not saved["owed"] and follows and loop.restarted_on_last:
        _overhear_plateaus(loop)


def _overhear_plateaus(loop: Any) -> None:
    """Lightning steps plateau schedulers behind the validation that it leaves out: here they were stepped."""
    begun = loop.batch_progress.total.ready

    def update(interval: str, update_plateau_schedulers: bool) -> None:
        del loop.update_lr_schedulers
        if not update_plateau_schedulers or loop.batch_progress.total.ready > begun:
            loop.update_lr_schedulers(interval, update_plateau_schedulers)

    loop.update_lr_schedulers = update


def _distributed_like(parameter: Tensor, value: Tensor) -> Tensor:
    """What was distributed when it was saved is whole now: this rank's part of it. Called on every rank."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def begin_epoch(trainer: Trainer) -> None:
    """Let a run that resumes between two epochs begin the next one like any other.

    Lightning would treat the whole epoch as a restarted one: it would keep the iterator that it made before
    any hook ran, take the first batch for a validated one, and leave out plateau schedulers.
    """
    # By the base class: the fit loop's own setter takes no False for an answer when max_steps is set.
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]
    trainer.fit_loop._resuming_from_checkpoint = False


def _end_epoch(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Count the epoch that a step lies in, as the process had that ended there: a next fit begins another."""
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress
    batches: Any = loop.batch_progress
    for counts in (epochs.current, epochs.total):
        counts.processed = counts.completed = counts.started
    for counts in (batches.current, batches.total):
        counts.completed = counts.processed  # saved in its hook
    if saved["stepped"] is not None:
        loop._batches_that_stepped = saved["stepped"]
    begin_epoch(trainer)


def extras_of(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Our part of a checkpoint; None for one that Lightning wrote by itself."""
    extras: dict[str, Any] | None = checkpoint.get(EXTRAS)
    return extras
