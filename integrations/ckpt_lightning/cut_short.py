"""SIGTERM that Lightning hears between two batches of a validation: what of that can be saved.

A run that resumes from such a step leaves out the rest of the validation. That is harmless where nothing but
metrics come of it. It is not where weights of training are swapped out meanwhile, or where something goes by
what was validated: then nothing is saved, and a run goes on from an earlier step.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelPruning

from ckpt_lightning.capture import Moment, after_batch, before_next_batch, between_epochs
from ckpt_lightning.loops import AVERAGING, callbacks_of, swapping_optimizers
from ckpt_lightning.pending import AFTER_VALIDATION, has_own
from ckpt_lightning.traps import is_of_user

NOTHING_SAVED = (
    "SIGTERM came within a validation: the step that was reached is not saved, since what the validation "
    "changes (averaged weights, plateau schedulers, early stopping, hooks around it) would be half done. "
    "A run that resumes goes on from the step saved before"
)

_IN_CALLBACKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
)
_IN_MODULE = ("on_validation_model_eval", *_IN_CALLBACKS, *AFTER_VALIDATION)


def at_sigterm(trainer: Trainer) -> Moment:
    """Where training stands when Lightning ends it for SIGTERM (on_exception)."""
    epochs = trainer.fit_loop.epoch_progress.current
    if epochs.ready == epochs.completed:
        return between_epochs(trainer)
    if trainer.validating:  # Lightning has not counted the batch before it
        return after_batch(trainer, owed="validation")
    return before_next_batch(trainer)


def rest_counts(trainer: Trainer) -> bool:
    """Whether a state from within a validation is no state of training, or lacks what is still to come of it.

    Called in on_train_start, on every rank, which come to the same answer: a collective.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    counts = (
        has_own(_IN_MODULE, trainer.lightning_module)
        or bool(swapping_optimizers(trainer))
        or any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        or bool(callbacks_of(trainer, AVERAGING, EarlyStopping, ModelPruning))
        or any(is_of_user(one, hook) for one in callbacks for hook in _IN_CALLBACKS)
    )
    return trainer.strategy.reduce_boolean_decision(counts, all=False)
