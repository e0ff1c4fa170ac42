"""What Lightning lets rank 0 do alone, or a strategy by itself, is done by all ranks for steps of ours.

    save_checkpoint   `trainer.save_checkpoint(root)`: each rank writes its share; one commit
    load_checkpoint   strategies of sharded states ask no CheckpointIO: each rank reads its parts

Files, and directories that are not ours, are left to the strategy.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from ckpt_core import Checkpointer, RestoredStep
from ckpt_lightning.checkpoint_io import StepIO, names_a_file
from ckpt_lightning.ranks import Ranks
from ckpt_lightning.resume import check_model, checked_tree
from ckpt_lightning.sharded import (
    is_sharded,
    is_step_of_ours,
    live_states,
    receiving,
    root_and_step,
)
from ckpt_lightning.texts import tell


def resume_together(
    checkpointer: Checkpointer, trainer: Trainer, module: LightningModule, *, trusted: bool
) -> int | None:
    """Let Lightning go on from the newest step that is whole on all ranks; the step, or None for none.

    Called on every rank: in setup(); if states are sharded, in on_fit_start, when the parts are there. A step
    that is corrupt on one rank is passed over by all, with a warning.

    Raises:
        CorruptCheckpoint: there are steps, and none is whole.
        StateMismatch: the step is of another model.
    """
    if is_sharded(trainer):
        found = _received(checkpointer, trainer, module, trusted)
    else:
        found = _restored(checkpointer, None, trusted)
    if found is None:
        return None
    tree = checked_tree(found.state, found.path)
    if not is_sharded(trainer):
        check_model(module, tree, found.path)
    # Not a public name. Lightning would set it to the same, from a path that it is given.
    trainer._checkpoint_connector._loaded_checkpoint = tree
    return found.step


@dataclass(frozen=True)
class Doors:
    """Stand in the strategy's way for directories of ours. Made in setup()."""

    trainer: Trainer
    module: LightningModule
    io: StepIO
    ranks: Ranks

    def install(self) -> None:
        """Called at each setup(); takes the place of those of an earlier one."""
        strategy: Any = self.trainer.strategy
        sharded = is_sharded(self.trainer)
        if self.ranks.several or sharded:
            strategy.save_checkpoint = self.save
        if sharded:
            strategy.load_checkpoint = self.load

    def save(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Called on every rank, with the checkpoint that Lightning has dumped."""
        path = self.ranks.first(str(filepath))
        if names_a_file(path):
            self.ranks.own_method("save_checkpoint")(
                checkpoint, path, storage_options=storage_options
            )
            return
        if is_sharded(self.trainer):
            states = live_states(self.trainer)
            checkpoint = {key: states.get(key, value) for key, value in checkpoint.items()}
        self.io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Called on every rank, when the sharded states are there to be filled."""
        given = self.ranks.first(str(checkpoint_path))
        path = Path(os.path.abspath(given))
        is_url = "://" in given
        if is_url or not is_step_of_ours(path):
            found: dict[str, Any] = self.ranks.own_method("load_checkpoint")(
                given if is_url else path, weights_only=weights_only
            )
            return found
        root, step = root_and_step(path)
        trusted = self.io.trusted if weights_only is None else not weights_only
        if (recorder := self.io.recorder_of(root)) is not None:
            return self._tree(recorder.session.checkpointer, step=step, trusted=trusted)
        with self.ranks.open(root, self.io.options) as checkpointer:
            return self._tree(checkpointer, step=step, trusted=trusted)

    def _tree(self, checkpointer: Checkpointer, *, step: int, trusted: bool) -> dict[str, Any]:
        found = _received(checkpointer, self.trainer, self.module, trusted, step)
        assert found is not None, "a step that is asked for is restored, or an error"
        return checked_tree(found.state, found.path)


def _received(
    checkpointer: Checkpointer,
    trainer: Trainer,
    module: LightningModule,
    trusted: bool,
    step: int | None = None,
) -> RestoredStep | None:
    """A step whose parts are in the model and the optimizers when this returns."""
    with receiving(trainer, module) as received:
        found = _restored(checkpointer, received.tree, trusted, step)
        received.state = None if found is None else found.state
    return found


def _restored(
    checkpointer: Checkpointer, live: Any, trusted: bool, step: int | None = None
) -> RestoredStep | None:
    """`checkpointer.restore`, whose warnings are told once, by rank 0, in the words of this package."""
    filters = warnings.filters
    try:
        with warnings.catch_warnings():
            # They are in `.skipped`; and `warn_about_change` says what is taken from another rank.
            for text in (r"step \d+ was not restored", r"rank \d+ took", "private values of"):
                warnings.filterwarnings("ignore", message=text)
            found = checkpointer.restore(live, step=step, trusted=trusted)
    finally:
        # Ctrl-C between the calls of the `with` would leave these off; a Trainer goes on after it.
        warnings.filters = filters
    for skipped, why in found.skipped if found is not None else ():
        tell(f"step {skipped} is corrupt, going back to the next older one: {why}")
    return found
