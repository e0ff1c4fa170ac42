"""One fit of one rank under a strategy that shards, on CPUs. Needs Lightning and what the strategy needs."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ckpt_core.bench.contenders import OURS, State
from ckpt_core.bench.fit_clock import Begun, FitClock, Fitted
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.window import Window
from ckpt_lightning_tools.bench import fitting
from ckpt_lightning_tools.bench.sharded import RANKS


class FsdpOnCpus(FSDPStrategy):
    """As on a GPU, but for what asks for one."""

    def _setup_model(self, model: nn.Module) -> Any:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class DeepSpeedOnCpus(DeepSpeedStrategy):
    """As on a GPU, but for what asks for one."""

    def setup_environment(self) -> None:
        """That of its parent, which asks for none."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Without a look at the accelerator."""
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _get_process_group_backend(self) -> str:
        return "gloo"

    @property
    def root_device(self) -> torch.device:
        """No index but that of the CPU."""
        return torch.device("cpu", 0)


def _strategy(name: str, batch: int) -> Any:
    if name == "fsdp":
        return FsdpOnCpus(
            auto_wrap_policy={nn.TransformerEncoderLayer},
            process_group_backend="gloo",
            state_dict_type="sharded",
        )
    zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    return DeepSpeedOnCpus(config={**zero, "train_micro_batch_size_per_gpu": batch})


class _Keeps(fitting.Clock):
    """Also has what this rank holds when training ends."""

    state: State

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the strategy is taken down."""
        self.state = _held(trainer)


class _Ends(fitting.Ends):
    """Also has what this rank holds when the first step begins."""

    state: State

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """The first one."""
        self.state = _held(trainer)
        raise Begun


def _held(trainer: Trainer) -> State:
    """Aliases of this rank's parameters and tensors of the optimizer."""
    assert trainer.strategy.model is not None
    state: State = {
        f"model.{name}": tensor.detach()
        for name, tensor in trainer.strategy.model.named_parameters()
    }
    given: Any = trainer.optimizers[0]
    # DeepSpeed keeps the one that it was given inside of its own.
    optimizer = getattr(given, "optimizer", given)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for index, parameter in enumerate(parameters):
        # In an order of ours: what is loaded may come in another one.
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                state[f"optimizer.{index}.{key}"] = value.detach()
    return state


def _let_go(trainer: Trainer) -> None:
    """Hooks of DeepSpeed's on gradients keep its engine, and all that it holds, where no collector looks."""
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:
        engine.destroy()


@dataclass(frozen=True)
class ShardedFitting:
    """As `Fitting` has it, under one strategy, for models of one size."""

    strategy: str
    size: dict[str, Any]

    def model(self, size: dict[str, Any]) -> fitting.LanguageModel:
        """A new one."""
        return fitting.LanguageModel(size)

    def fit(
        self,
        name: str,
        model: fitting.LanguageModel,
        *,
        size: dict[str, Any],
        window: Window,
        root: Path,
        staging_bytes: int | None = None,
    ) -> Fitted:
        """On both ranks."""
        steps, clock = window.lead + window.steps, FitClock(window)
        savers, _ = fitting.way(name, root, window.every, staging_bytes)
        for saver in savers:
            clock.watch(saver, fitting.HOOKS)
        keeps = _Keeps(clock)
        trainer = self._trainer([keeps, *savers], steps, size)
        began = time.perf_counter()
        trainer.fit(model, fitting.data(size, steps))
        fit_s = time.perf_counter() - began
        _let_go(trainer)
        return clock.found(
            fit_s=fit_s,
            processor_s=processor_s(os.getpid()),
            state=keeps.state,
        )

    def resume(self, name: str, model: Any, *, size: dict[str, Any], root: Path) -> float:
        """On both ranks."""
        return self._resumed(name, model, size, root)[0]

    def saved_state(self, name: str, root: Path) -> State:
        """What a rank has when it goes on from there: no rank could read it alone."""
        return self._resumed(name, self.model(self.size), self.size, root)[1]

    def _resumed(
        self, name: str, model: Any, size: dict[str, Any], root: Path
    ) -> tuple[float, State]:
        savers, _ = fitting.way(name, root, 2, None)
        ends = _Ends()
        trainer = self._trainer([ends, *savers], 1000, size)
        # A root of ours is gone on from by itself.
        path = None if name == OURS else str(fitting.newest(root))
        began = time.perf_counter()
        with contextlib.suppress(Begun):
            trainer.fit(model, fitting.data(size, 1000), ckpt_path=path, weights_only=False)
        seconds = time.perf_counter() - began
        _let_go(trainer)
        return seconds, ends.state

    def _trainer(self, callbacks: list[Any], steps: int, size: dict[str, Any]) -> Trainer:
        return fitting.new_trainer(
            callbacks,
            [],
            steps,
            saves=len(callbacks) > 1,
            devices=RANKS,
            strategy=_strategy(self.strategy, size["batch"]),
        )
