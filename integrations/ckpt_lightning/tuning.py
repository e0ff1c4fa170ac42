"""Lightning's finders of a learning rate or a batch size, which train a little before training begins.

A Tuner has its finder search in a `fit` of its own, which is none of ours. As a callback, a finder searches
in on_fit_start: a run that resumes has its weights by then, and not yet its optimizers and counters. At the
end it loads what it had put into a file, and Lightning forgets the checkpoint that the run resumes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.seed import isolate_rng

from ckpt_lightning.loops import callbacks_of

_FILES = (".lr_find_", ".scale_batch_size_")
Resumed = tuple[dict[str, Any], Any]


def only_searches(trainer: Trainer) -> bool:
    """Whether this fit is a Tuner's, and ends with the search."""
    return any(finder._early_exit for finder in _finders(trainer))


def loads_own_file(trainer: Trainer) -> bool:
    """Whether it is a finder that loads a checkpoint: the state before its search."""
    return Path(trainer.ckpt_path or "").name.startswith(_FILES)


def kept(trainer: Trainer, checkpoint: dict[str, Any]) -> Resumed | None:
    """What a run resumes from, for `after_search`; None without finders. Called in on_load_checkpoint."""
    return (checkpoint, trainer.ckpt_path) if _finders(trainer) else None


def after_search(trainer: Trainer, resumed: Resumed | None) -> None:
    """Let Lightning go on as if nothing had been searched. Called in on_fit_start, behind the finders."""
    loop = trainer.fit_loop
    if resumed is not None:
        connector: Any = trainer._checkpoint_connector
        connector._loaded_checkpoint, connector._ckpt_path = resumed
        forget_loaders(trainer)
    elif loop._combined_loader is not None:
        # Workers drew with the generators as the search had left them, which no resume could have again.
        forget_loaders(trainer)
        with isolate_rng():
            loop.setup_data()


def forget_loaders(trainer: Trainer) -> None:
    """Those that a finder has made, before their states are loaded: Lightning makes them again."""
    trainer.fit_loop._combined_loader = None


def _finders(trainer: Trainer) -> list[Any]:
    return callbacks_of(trainer, BatchSizeFinder, LearningRateFinder)
