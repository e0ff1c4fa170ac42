"""The state of a Trainer as one tree: what Trainer writes into its directories, and what that leaves out.

Its entries:

    model, optimizer, scheduler, scaler    the live objects; the engine copies and slices them
    trainer                                TrainerState with the states of callbacks, as Trainer's own JSON
    loop                                   where the epoch stands, and losses that are not logged yet
    rng                                    generators: now, at the epoch's begin, at the next batch
    files                                  config.json, tokenizer, ... for `export`
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from ckpt_core import RngState

PRIVATE = ("trainer", "loop", "rng")
"""Entries that are each rank's own; the others are equal on all, or distributed."""

_FORMAT = 1


class Kept:
    """A dict of any structure, as an object: a restore hands over what was saved, whatever is here now."""

    def __init__(self, value: dict[str, Any] | None = None) -> None:
        self.value = {} if value is None else value

    def state_dict(self) -> dict[str, Any]:
        """Called by a save."""
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by a restore."""
        self.value = state


@dataclass(frozen=True)
class EpochPlace:
    """Where training stands in an epoch.

    Attributes:
        epoch: number of the epoch that runs, or is over.
        updates: optimizer steps of it that are done.
        length: optimizer steps that it has.
        boundary: everything that belongs to the epoch is over.
    """

    epoch: int
    updates: int
    length: int
    boundary: bool = False


def live(trainer: Trainer) -> dict[str, Any]:
    """The objects that are filled in place by a restore. Called when optimizer and scheduler are there."""
    objects = {
        "model": trainer.model,
        "optimizer": optimizer_of(trainer),
        "scheduler": trainer.lr_scheduler,
    }
    scaler = getattr(trainer.accelerator, "scaler", None)
    return objects if scaler is None else {**objects, "scaler": scaler}


def optimizer_of(trainer: Trainer) -> Any:
    """The user's: Accelerate's wrapper is an optimizer too, without a state of its own."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def dump(
    trainer: Trainer, place: EpochPlace, *, rng: dict[str, Any], best: dict[str, int]
) -> dict[str, Any]:
    """The tree as of now, but for `files`. Called on the training thread.

    Args:
        rng: generators of earlier moments, beside those of now.
        best: which steps are, and were, the best.
    """
    loop = {
        "format": _FORMAT,
        "world_size": trainer.args.world_size,
        "epoch": place.epoch,
        "updates": place.updates,
        "length": place.length,
        "boundary": place.boundary,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "last_logged": trainer._globalstep_last_logged,
        "loss": trainer._tr_loss,
        **best,
    }
    generators = {"now": RngState().state_dict(), **rng}
    kept = {"loop": Kept(loop), "rng": Kept(generators)}
    return {**live(trainer), "trainer": state_text(trainer), **kept}


def state_text(trainer: Trainer) -> str:
    """TrainerState with the present states of callbacks, as Trainer writes it."""
    exportable: list[Any] = [
        callback
        for callback in [*trainer.callback_handler.callbacks, trainer.control]
        if isinstance(callback, ExportableState)
    ]
    # Its constructor gathers them. Trainer's own way appends those of equal callbacks again at each save.
    gathered = TrainerState(stateful_callbacks=exportable).stateful_callbacks
    state = dataclasses.replace(trainer.state, stateful_callbacks=gathered)
    return json.dumps(dataclasses.asdict(state))


def state_of(text: str) -> TrainerState:
    """The state that was saved as `text`."""
    return TrainerState(**json.loads(text))


def was_to_stop(text: str) -> bool:
    """Whether training was to end when that state was saved; SIGTERM, for one, wishes so too."""
    callbacks: Any = state_of(text).stateful_callbacks
    return bool(callbacks.get("TrainerControl", {}).get("args", {}).get("should_training_stop"))
