"""FSDP and tensor parallelism: states whose parts are on different ranks.

Lightning would copy parameters to the CPU, and name optimizer states by parameter. We take the live DTensors,
of which the engine stores each rank's part, under the names of any other strategy: steps can be
resumed with another number of ranks, and by another strategy. FSDPStrategy has no such tensors: `fsdp` makes
them of copies.

Lightning loads such states before anything else of a checkpoint, after on_fit_start, by the strategy alone;
we put each rank's part of them into the live tensors at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

from ckpt_core import NotCommitted, committed_steps, step_path
from ckpt_lightning import fsdp


def is_sharded(trainer: Trainer) -> bool:
    """Whether parts of the state are on different ranks."""
    return isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy)


def loads_late(trainer: Trainer) -> bool:
    """Whether Lightning loads the states once they are where they belong: after on_fit_start."""
    return is_sharded(trainer) or isinstance(trainer.strategy, DeepSpeedStrategy)


def copied_already(trainer: Trainer) -> tuple[str, ...]:
    """Entries of a checkpoint that training does not change any more."""
    strategy = trainer.strategy
    copied = isinstance(strategy, FSDPStrategy) and not fsdp.is_cut(strategy)
    return ("state_dict",) if copied else ()


def live_states(trainer: Trainer) -> dict[str, Any]:
    """What stands in a checkpoint for the states of a sharded model and its optimizers."""
    model, optimizer_state = _doors(trainer)
    return {
        "state_dict": model(),
        "optimizer_states": [optimizer_state(optimizer) for optimizer in trainer.optimizers],
    }


@contextmanager
def referring(trainer: Trainer) -> Iterator[None]:
    """Within it, a checkpoint that is dumped refers to the live states, whatever the strategy."""
    if not is_sharded(trainer) and not isinstance(trainer.strategy, DeepSpeedStrategy):
        yield
        return
    strategy: Any = trainer.strategy
    strategy.lightning_module_state_dict, strategy.optimizer_state = _doors(trainer)
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def _doors(trainer: Trainer) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What gives the state of the model, and that of an optimizer."""
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        return dict, lambda optimizer: {}  # its own files have them
    if isinstance(strategy, FSDPStrategy):
        return partial(fsdp.model_state, strategy), partial(fsdp.optimizer_state, strategy)
    return trainer.lightning_module.state_dict, _state_of


@contextmanager
def receiving(trainer: Trainer, module: LightningModule) -> Iterator[Received]:
    """A tree that a step is restored into, and what must be done behind that. Called on every rank."""
    strategy = trainer.strategy
    if not isinstance(strategy, FSDPStrategy):
        yield Received(live_tree(trainer, module))
        return
    optimizers = list(strategy.optimizers) if trainer.optimizers else []
    into = fsdp.Into.of(strategy, optimizers)
    received = Received(Open(into.tree))
    try:
        yield received
    finally:
        if received.state is None:
            into.drop()
    if received.state is not None:
        into.load(received.state, strict=bool(module.strict_loading))


@dataclass
class Received:
    """`state` is None until a step has been restored into `tree`."""

    tree: Any
    state: Any = None


def live_tree(trainer: Trainer, module: LightningModule) -> Any:
    """What a step is restored into: the live tensors; everything else is whatever was saved."""
    fitting = {"optimizer_states": list(trainer.strategy.optimizers)} if trainer.optimizers else {}
    return Open({"state_dict": module.state_dict(), **fitting})


def is_step_of_ours(path: str | Path) -> bool:
    """Whether it is a root or a step directory; the strategy's own checkpoints are directories too."""
    found = Path(path)
    return found.is_dir() and not (found / "meta.pt").is_file()


def root_and_step(path: Path) -> tuple[Path, int]:
    """Root and step that a path means: of a root, the newest one.

    Raises:
        NotCommitted: there is none.
    """
    steps = {step_path(path.parent, step): step for step in committed_steps(path.parent)}
    if path in steps:
        return path.parent, steps[path]
    inside = committed_steps(path)
    if not inside:
        raise NotCommitted(f"{path} holds no committed step", path=path)
    return path, inside[-1]


def _state_of(optimizer: Any) -> dict[str, Any]:
    # Lightning wraps the optimizers that it hands out.
    state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
    return state


class Open(dict[str, Any]):
    """A mapping that has every key: those that were not given stand for plain values."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> None:
        return None
