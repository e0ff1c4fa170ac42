"""FSDP2 and tensor parallelism (ModelParallelStrategy): states whose parts are on different ranks.

Lightning would copy parameters to the CPU, and name optimizer states by parameter. We take the live DTensors,
of which the engine stores each rank's part, under the names of any other strategy: steps can be
resumed with another number of ranks, and by another strategy.

Lightning loads such states before anything else of a checkpoint, after on_fit_start, by the strategy alone;
we put each rank's part of them into the live tensors at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from ckpt_core import NotCommitted, committed_steps, step_path


def is_sharded(trainer: Trainer) -> bool:
    """Whether parts of the state are on different ranks."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def live_states(trainer: Trainer) -> dict[str, Any]:
    """What stands in a checkpoint for the states of a sharded model and its optimizers."""
    optimizers = [_state_of(optimizer) for optimizer in trainer.optimizers]
    return {"state_dict": trainer.lightning_module.state_dict(), "optimizer_states": optimizers}


@contextmanager
def referring(trainer: Trainer) -> Iterator[None]:
    """Within it, a checkpoint that is dumped refers to the live states, whatever the strategy."""
    if not is_sharded(trainer):
        yield
        return
    strategy: Any = trainer.strategy
    strategy.lightning_module_state_dict = trainer.lightning_module.state_dict
    strategy.optimizer_state = _state_of
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def live_tree(trainer: Trainer, module: LightningModule) -> Any:
    """What a step is restored into: the live tensors; everything else is whatever was saved."""
    fitting = {"optimizer_states": list(trainer.strategy.optimizers)} if trainer.optimizers else {}
    return _Open({"state_dict": module.state_dict(), **fitting})


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


class _Open(dict[str, Any]):
    """A mapping that has every key: those that were not given stand for plain values."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> None:
        return None
