"""How many batches an epoch has, when that changes with a resume.

A `ResumableLoader` goes on in the middle of an epoch with another number of ranks, or another batch size:
then the epoch has other batches left than Lightning has reckoned, which asks loaders for their length before
it loads their states, and never again.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage

from ckpt_core.data import ResumableLoader
from ckpt_lightning.position import loaders


def measure_again(trainer: Trainer) -> None:
    """Let Lightning reckon with the batches that there are. Called before an epoch begins or goes on.

    Does nothing unless all training loaders are ResumableLoaders, and a length has changed.
    """
    loop = trainer.fit_loop
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    found = loaders(trainer)
    if combined is None or fetcher is None or not found:
        return
    if not all(isinstance(loader, ResumableLoader) for loader in found):
        return
    limit, stage = trainer.limit_train_batches, RunningStage.TRAINING
    limits = [_parse_num_batches(stage, len(loader), limit) for loader in found]
    if limits == combined.limits:
        return
    combined.limits = limits
    iter(fetcher)  # Takes nothing from the loaders: a ResumableLoader begins with its first batch.
    loop.max_batches = len(combined)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))
