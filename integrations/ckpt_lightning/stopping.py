"""`trainer.should_stop`, which Lightning saves nowhere, for the run that resumes.

held back           min_steps or min_epochs were not reached: it stops once they are
an EarlyStopping    had ended the run: it trains nothing more, unless the one of now would not have done that
other code          had ended the run: it goes on, and whoever asked may ask again
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping

from ckpt_lightning.loops import callbacks_of

_SETTINGS = ("min_delta", "check_finite", "stopping_threshold", "divergence_threshold")


def asked_to_stop(trainer: Trainer) -> dict[str, Any]:
    """For the tree of a snapshot."""
    if not trainer.should_stop:
        return {}
    return {
        "held_back": not trainer.fit_loop._can_stop_early,
        "early": {one.state_key: _settings(one) for one in callbacks_of(trainer, EarlyStopping)},
    }


def stops_again(trainer: Trainer, checkpoint: dict[str, Any], extras: dict[str, Any]) -> bool:
    """Whether a run that resumes is asked to stop. On one rank; one that says so speaks for all.

    Called in on_load_checkpoint: with its state, an EarlyStopping gets the patience of then.
    """
    asked = extras.get("stopping")
    if not asked:
        return False
    states = checkpoint.get("callbacks", {})
    return asked["held_back"] or any(
        asked["early"].get(one.state_key) == _settings(one)
        and _says_so(one, states[one.state_key], extras["metrics"].get(one.monitor))
        for one in callbacks_of(trainer, EarlyStopping)
    )


def _says_so(one: EarlyStopping, state: dict[str, Any], value: torch.Tensor | None) -> bool:
    if state["wait_count"] >= one.patience:
        return True
    if value is None:
        return False
    good, bad = one.stopping_threshold, one.divergence_threshold
    return (
        (one.check_finite and not bool(torch.isfinite(value)))
        or (good is not None and bool(one.monitor_op(value, good)))
        or (bad is not None and bool(one.monitor_op(-value, -bad)))
    )


def _settings(one: EarlyStopping) -> dict[str, Any]:
    return {name: getattr(one, name) for name in _SETTINGS}
