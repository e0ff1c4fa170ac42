"""Names of checkpoints that Lightning looks up by itself, and where it would know of none of ours.

    ckpt_path="last", "best"       asked of ModelCheckpoint alone, or of what this process has trained
    load_from_checkpoint(path)     opens a file, and asks nobody

Lightning has no hook for either, so two of its functions are wrapped when the package is imported. Whatever
is not ours goes through unchanged.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.trainer.states import TrainerFn

from ckpt_core import NotCommitted
from ckpt_lightning.loops import callbacks_of, is_fast_dev_run
from ckpt_lightning.paths import Paths
from ckpt_lightning.resume import load

_MARK = "_ckpt_lightning"
_NONE_OF_THEIRS = ".*is set, but there is no last checkpoint available"


def register() -> None:
    """Let Lightning ask our callback for "last" and "best", and open directories of ours. Idempotent."""
    connector: Any = checkpoint_connector._CheckpointConnector
    if not hasattr(connector._parse_ckpt_path, _MARK):
        connector._parse_ckpt_path = _parsing(connector._parse_ckpt_path)
        saving.pl_load = _opening(saving.pl_load)  # type: ignore[attr-defined]


def _parsing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _parse_ckpt_path(
        self: Any, state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def theirs() -> Any:
            return original(self, state_fn, ckpt_path, *args, **kwargs)

        trainer: Trainer = self.trainer
        first: Any = trainer.checkpoint_callback
        if ckpt_path == "best" and isinstance(first, Paths) and not is_fast_dev_run(trainer):
            _insist(first, first.best_model_path, state_fn, "best")
        ours = [one for one in trainer.checkpoint_callbacks if isinstance(one, Paths)]
        if ckpt_path == "last" and ours:
            return _last(trainer, ours[0], state_fn, theirs)
        return theirs()

    setattr(_parse_ckpt_path, _MARK, True)
    return _parse_ckpt_path


def _last(
    trainer: Trainer, ours: Paths, state_fn: TrainerFn, theirs: Callable[[], Any]
) -> str | None:
    """The newest of all; None where a fit finds it by itself, or begins from the start."""
    path, other = ours.last_model_path, None
    if callbacks_of(trainer, ModelCheckpoint, OnExceptionCheckpoint):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NONE_OF_THEIRS)
            other = theirs()
    if other and (not path or os.path.getmtime(other) > os.path.getmtime(path)):
        return str(other)
    if state_fn == TrainerFn.FITTING:
        return (path or None) if ours.knows_root else None
    return _insist(ours, path, state_fn, "last")


def _insist(ours: Paths, path: str, state_fn: TrainerFn, name: str) -> str:
    if path:
        return path
    what = "committed step" if ours.monitor is None or name == "last" else "step with a score of it"
    by = "" if ours.monitor is None or name == "last" else f" (monitor={ours.monitor!r})"
    raise NotCommitted(
        f"{state_fn.value}(ckpt_path={name!r}){by}: {ours.root} holds no {what}. Train first, name another "
        f"root, or leave ckpt_path out to go on with the weights as they are",
        path=ours.root,
    )


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `load_from_checkpoint` opens: a root or a step directory, or whatever Lightning knows."""

    @functools.wraps(original)
    def pl_load(
        path_or_url: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        if not isinstance(path_or_url, str | os.PathLike) or not os.path.isdir(path_or_url):
            return original(path_or_url, map_location, weights_only=weights_only)
        tree = load(Path(path_or_url), trusted=weights_only is False)
        if isinstance(map_location, str | torch.device):
            tree["state_dict"] = {
                name: value.to(map_location) if isinstance(value, torch.Tensor) else value
                for name, value in tree["state_dict"].items()
            }
        return tree

    return pl_load
