"""Several ranks that train together: what each of them stores, and how all of them decide alike.

Under DDP, parameters and optimizer states are equal on all ranks, and each rank stores a slice. Everything
else is each rank's own: generators, the position in the data, loops, callbacks, and the buffers of the module
(BatchNorm's statistics differ from rank to rank, until DDP takes those of rank 0 for all).

All ranks must save the same steps. What is decided by counting is equal anyway; what a clock or a metric
decides, rank 0 decides for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ckpt_core import Checkpointer, ConfigError, EveryNSteps, FlatPart, Options, TorchStore
from ckpt_core.data import ResumableLoader
from ckpt_lightning.position import loaders
from ckpt_lightning.rescue import Armed, ArmedTogether, Save
from ckpt_lightning.texts import Teller
from ckpt_lightning.triggers import Schedule, Triggers

T = TypeVar("T")

_MODELS = ("state_dict", "current_model_state")
"""Entries of a checkpoint that hold parameters by their names; the second one is WeightAveraging's."""


class Ranks:
    """The ranks of a job, as one of them sees them; of one process alone, it does nothing special.

    Made in setup(), when the process group is up.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.several: bool = trainer.world_size > 1
        self.trainer = trainer
        self._module = module
        self._store: TorchStore | None = None

    def open(self, root: Path, options: Options) -> Checkpointer:
        """A Checkpointer of all ranks. Called on every rank.

        Raises:
            CkptError: as `Checkpointer`; also when another rank could not open the root.
        """
        self._store = TorchStore.from_process_group() if self.several else None
        return Checkpointer(root, options, coordination=self._store)

    def first(self, value: T) -> T:
        """The value of rank 0. Called on every rank: a collective."""
        found: T = self.trainer.strategy.broadcast(value) if self.several else value
        return found

    def private(self, tree: Mapping[str, Any]) -> list[str] | None:
        """Paths of a checkpoint that are each rank's own, for `per_rank=`."""
        if not self.several:
            return None
        names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        # What DDP is told to leave alone is not kept equal by anybody.
        names -= set(getattr(self._module, "_ddp_params_and_buffers_to_ignore", ()))
        paths: list[str] = []
        for key, value in tree.items():
            if key in _MODELS:
                own = {name: item for name, item in value.items() if name not in names}
                for name, item in own.items():
                    paths += _plain_paths(item, f"{key}.{name}")
            elif key != "optimizer_states":
                paths += _plain_paths(value, str(key))
        return paths

    @property
    def viewpoint(self) -> int | None:
        """Whose private values a checkpoint is loaded with: training goes on with one's own."""
        if self.several and self.trainer.state.fn == TrainerFn.FITTING:
            return int(self.trainer.global_rank)
        return None

    def own_method(self, name: str) -> Any:
        """The strategy's own method, which stays below one of ours."""
        strategy = self.trainer.strategy
        return getattr(type(strategy), name).__get__(strategy)

    def decide_alike(self, schedule: Schedule) -> None:
        """Let rank 0 decide for all, where the ranks might not come to the same decision."""
        if self.several and any(type(policy) is not EveryNSteps for policy in schedule.policies):
            schedule.agree = self.first

    def possible(self, triggers: Triggers, teller: Teller) -> Triggers:
        """What several ranks can do of these triggers; says so where it is less."""
        by_deepspeed = isinstance(self.trainer.strategy, DeepSpeedStrategy)
        if not (self.several and by_deepspeed and triggers.save_on_exception):
            return triggers
        teller.once(
            "save_on_exception is ignored under DeepSpeedStrategy with several ranks: DeepSpeed saves by "
            "collectives, and a rank that has failed comes to none. Save more often; SIGTERM to all ranks "
            "still saves"
        )
        return replace(triggers, save_on_exception=False)

    def armed(self, save: Save, *, timeout_s: float) -> Armed:
        """What keeps the last whole step for `save_on_exception`. Called on every rank, behind `open`.

        Args:
            save: starts a save of it.
            timeout_s: of a save.
        """
        if self._store is None:
            return Armed(save)
        listens = self.trainer.strategy.root_device.type == "cpu"
        return ArmedTogether(save, store=self._store, timeout_s=timeout_s, listens=listens)

    def check_optimizers(self) -> None:
        """Refuse what cannot be saved. Called on every rank, once there are optimizers.

        Raises:
            ConfigError: an optimizer does not show all of its state.
        """
        if isinstance(self.trainer.strategy, DeepSpeedStrategy):
            return  # saves by itself
        for optimizer in self.trainer.optimizers if self.several else ():
            if hasattr(optimizer, "consolidate_state_dict"):
                raise ConfigError(
                    f"{type(optimizer).__name__} shows its whole state to rank 0 alone, so that the ranks "
                    f"cannot save it together: train with ModelParallelStrategy (FSDP2) to shard optimizers"
                )


def warn_about_change(trainer: Trainer, saved: Mapping[str, Any], teller: Teller) -> None:
    """Say what cannot be exact when another number of ranks goes on. Called in on_train_start."""
    before, now = saved.get("world_size", 1), trainer.world_size
    if before == now:
        _warn_about_buckets(trainer, teller)
        return
    own = "generators (dropout, augmentation), buffers such as BatchNorm's, metrics"
    if now > before:
        losses = [f"{own} of {_shown(before, now)}, which are those of another rank"]
    else:
        losses = [f"{own} of {_shown(now, before)}, which are dropped"]
    if saved["gradients"]:
        losses.append("the gradients that were being accumulated for the next step")
    if not all(isinstance(loader, ResumableLoader) for loader in loaders(trainer)):
        losses.append(
            "the data of this epoch, of which samples may be seen twice or not at all "
            "(ckpt_core.data.ResumableLoader sees each once)"
        )
    teller.once(
        f"a step of {before} ranks is resumed by {now}. Weights, optimizers and schedulers are restored "
        f"exactly. What cannot be exact: {'; '.join(losses)}. All ranks together take {now}/{before} of the "
        f"samples in a step, unless you changed the batch size"
    )


def _warn_about_buckets(trainer: Trainer, teller: Teller) -> None:
    """More than two numbers have no sum, only sums in an order."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or trainer.world_size <= 2:
        return
    if not strategy._ddp_kwargs.get("find_unused_parameters", False):
        teller.once(
            "everything is restored exactly, and the next step may still differ in its last bits from that "
            "of an uninterrupted run: DDP orders gradients anew after the first backward pass of a process, "
            "and more than two ranks then add them up in another order. With DDPStrategy("
            "find_unused_parameters=True), which costs a walk through the graph at each step, it does not"
        )


def _shown(begin: int, end: int) -> str:
    return f"rank {begin}" if end - begin == 1 else f"ranks {begin}-{end - 1}"


def _plain_paths(value: Any, path: str) -> list[str]:
    """The path, if nothing below it is distributed; else those below it of which that is true."""
    if not _holds_distributed(value):
        return [path]
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in _plain_paths(item, f"{path}.{key}")]
    if isinstance(value, list | tuple):
        return [row for n, item in enumerate(value) for row in _plain_paths(item, f"{path}.{n}")]
    return []


def _holds_distributed(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_distributed, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_distributed, value))
    return hasattr(value, "device_mesh") or isinstance(value, FlatPart)
