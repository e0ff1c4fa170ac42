"""A step of which all is taken but the tensors, which the module's own hook may still change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from ckpt_lightning.capture import EXTRAS
from ckpt_lightning.loops import batch_is_over
from ckpt_lightning.ranking import Change

AFTER_BATCH = ("on_train_batch_end",)
AFTER_VALIDATION = ("on_validation_end", "on_validation_model_train")


def has_own(hooks: tuple[str, ...], module: LightningModule) -> bool:
    """Whether the module has one of these hooks, which comes after every callback's."""
    return any(is_overridden(name, module) for name in hooks)


@dataclass(frozen=True)
class Pending:
    """One step, from that hook on until it is saved or kept at hand.

    Attributes:
        early: what must be as of that batch, or of the validation behind it.
        due: it is to be saved; else kept at hand, if a failure should save it.
        fetch_rng: generators at the last fetch, before that batch.
        score: the monitored value of that validation.
        change: what the save does to the ranking, which counts on it already.
    """

    step: int
    early: dict[str, Any]
    due: bool
    fetch_rng: dict[str, Any]
    score: float | None
    change: Change

    def is_whole(self, trainer: Trainer) -> bool:
        """Whether the module's hook has run, and plateau schedulers behind it."""
        loop = trainer.fit_loop.epoch_loop
        stepped = loop._batches_that_stepped == self.early[EXTRAS]["stepped"]
        # In a validation behind a batch without a step, the batch alone would not tell.
        return batch_is_over(trainer) and stepped and not trainer.validating
