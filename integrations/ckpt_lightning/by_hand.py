"""`trainer.save_checkpoint(root)`: what Lightning has dumped becomes a tree to go on from, whatever the root.

before training begins   a run that resumes has still what was loaded: its place is that of the step
while it trains          where the hook stands that asks
after the fit            where it has ended, whatever was validated or tested since
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer

from ckpt_lightning.capture import EXTRAS, Moment, completed, in_any_hook, passing
from ckpt_lightning.loops import within_batch
from ckpt_lightning.position import DataPosition
from ckpt_lightning.texts import Teller

_WITHIN_BATCH = (
    "trainer.save_checkpoint was called within a batch: a run that resumes from this step leaves that batch "
    "out. Call it in on_train_batch_end, on_validation_end or on_train_epoch_start"
)


@dataclass
class ByHand:
    """Knows one fit, also when that is over. Used on the training thread."""

    trainer: Trainer
    position: DataPosition
    teller: Teller
    _loaded: dict[str, Any] = field(default_factory=dict)
    _trains: bool = False
    _end: dict[str, Any] = field(default_factory=dict)
    _loader_states: dict[str, Any] = field(default_factory=dict)
    _closed_at: int | None = None

    def resumes(self, checkpoint: dict[str, Any]) -> None:
        """Called in on_load_checkpoint, with a step of ours."""
        self._loaded = {key: checkpoint[key] for key in ("loops", EXTRAS)}

    def begins(self) -> None:
        """Called in on_train_start."""
        self._loaded, self._trains = {}, True

    def ends(self) -> None:
        """Called in on_train_end, since a validation or a test of the trainer changes all that."""
        moment = in_any_hook(self.trainer)
        extras = self.position.extras(self.trainer, boundary=moment.boundary)
        self._end = {**passing(self.trainer, moment), **extras}
        self._loader_states = self.trainer.fit_loop.on_save_checkpoint()

    def closes(self) -> None:
        """The fit is over, or has failed."""
        self._closed_at = self.trainer.global_step

    def completed(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The tree to save; and whether some of what belongs to the step is still to come."""
        if self._closed_at not in (None, checkpoint["global_step"]):
            return checkpoint, False  # trained on without us since
        if not self._trains:
            return {**checkpoint, **self._loaded}, False
        if within_batch(self.trainer):
            self.teller.once(_WITHIN_BATCH)
        moment = in_any_hook(self.trainer)
        checkpoint["loops"]["fit_loop"]["state_dict"].update(self._loader_states)
        tree = complete(checkpoint, self.trainer, self.position, moment)
        return {**tree, EXTRAS: {**tree[EXTRAS], **self._end}}, moment.unfinished


def complete(
    checkpoint: dict[str, Any], trainer: Trainer, position: DataPosition, moment: Moment
) -> dict[str, Any]:
    """What Lightning has dumped at this moment of a fit, as a tree to go on from."""
    extras = position.extras(trainer, boundary=moment.boundary)
    tree = completed(checkpoint, trainer, moment, extras)
    if moment.boundary:
        position.settle_boundary(trainer, tree)
    return tree
