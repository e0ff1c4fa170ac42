"""What comes before the hooks of all callbacks: ours is the last of them, as Lightning orders checkpoints.

A run that resumes between two epochs has them all called again, and one that resumes within an epoch those of
the next batch. What they do there must be in no step, or it is done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from ckpt_lightning.loops import callbacks_of
from ckpt_lightning.pending import has_own
from ckpt_lightning.traps import is_of_user

_Told = Callable[[Trainer], None]


class Foremost(Callback):
    """First of a trainer's callbacks, from on_train_start to the end of the fit."""

    def __init__(self, epoch_begins: _Told, batch_begins: _Told) -> None:
        self._epoch_begins = epoch_begins
        self._batch_begins = batch_begins

    def put(self, trainer: Trainer) -> None:
        """Called in a hook of callbacks: Lightning goes through the old list to its end."""
        # Not beside one that came with a copy of the list: the same callback would be told twice.
        others = [one for one in _callbacks(trainer) if not self._tells_as(one)]
        _set_callbacks(trainer, [self, *others])

    def take_away(self, trainer: Trainer) -> None:
        """Leave the trainer's callbacks as they were. Idempotent."""
        _set_callbacks(trainer, [one for one in _callbacks(trainer) if one is not self])

    def _tells_as(self, other: Callback) -> bool:
        return isinstance(other, Foremost) and other._epoch_begins == self._epoch_begins

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything of the epoch before is over, and nothing of this one has begun."""
        self._epoch_begins(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The next batch has been fetched."""
        self._batch_begins(trainer)


def changes_in(hook: str, trainer: Trainer) -> bool:
    """Whether the module or a callback of the user's has this hook, and may change weights in it."""
    mine = any(is_of_user(callback, hook) for callback in _callbacks(trainer))
    # It calls a function of the user's there.
    mine = mine or bool(callbacks_of(trainer, BaseFinetuning))
    return mine or has_own((hook,), trainer.lightning_module)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def _set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
