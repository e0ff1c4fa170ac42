"""Where Lightning's loops stand: questions that it has no public answer to, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer, callbacks

_Kind = TypeVar("_Kind")
_Told = Callable[[Trainer], None]

AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())  # new in Lightning 2.6

_watching: WeakKeyDictionary[Any, list[_Told]] = WeakKeyDictionary()
"""Who is told of the fetches of a loop of epochs."""


def batch_ends_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Whether no batch of this epoch follows."""
    return trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches


def callbacks_of(trainer: Trainer, *kinds: type[_Kind]) -> list[_Kind]:
    """Those of the trainer's callbacks that are of one of these classes."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in found if isinstance(one, kinds)]


def within_batch(trainer: Trainer) -> bool:
    """Whether a batch has been begun, and its hook at the end is still to come."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.processed < batches.started)


def batch_is_over(trainer: Trainer) -> bool:
    """Whether the module's hook at the end of the last batch has run, too."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.completed == batches.processed)


def validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates right after this batch."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def more_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the state behind this batch is not the one to save: that behind what follows is."""
    return batch_ends_epoch(trainer, batch_idx) or validation_follows(trainer)


def on_device(trainer: Trainer) -> bool:
    """Whether parameters lie elsewhere than in host memory, where nothing is page-locked."""
    return trainer.strategy.root_device.type != "cpu"


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether this is a trial of a few batches, which leaves nothing behind."""
    return bool(getattr(trainer, "fast_dev_run", False))


def logs_in_training(trainer: Trainer, name: str | None) -> bool:
    """Whether the training step logs such a metric, whose value may come at the end of the epoch."""
    logged = [result.meta.name for result in trainer.fit_loop.epoch_loop._results.values()]
    return name in [*logged, *(f"{one}_epoch" for one in logged)]


def ends_here(trainer: Trainer) -> bool:
    """Whether training ends after this batch, in the middle of an epoch."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def swapping_optimizers(trainer: Trainer) -> list[Any]:
    """Those that change parameters outside of steps, in `train()` and `eval()`: schedule-free ones."""
    found = [getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.optimizers]
    names = ("train", "eval")
    return [one for one in found if all(callable(getattr(one, name, None)) for name in names)]


def call_before_batches(trainer: Trainer, told: _Told) -> None:
    """Call this once, when all hooks of an epoch that begins are over, and before its iterator is made.

    Called in on_train_epoch_start. Where the iterator stands already, nothing was drawn by it yet.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    before = vars(loop).get("run")  # another callback's, that is to be told too

    def runs(data_fetcher: Any) -> None:
        if before is None:
            del loop.run
        else:
            loop.run = before
        told(trainer)
        loop.run(data_fetcher)

    loop.run = runs


def watch_fetches(trainer: Trainer, told: _Told) -> None:
    """Have somebody told before each fetch of training, once everything behind the last batch is over.

    No hook comes there but the one by which Lightning measures the fetch.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    watching = _watching.setdefault(loop, [])
    if not watching:
        measures = loop._on_before_fetch

        def before_fetch() -> None:
            for one in watching:
                one(trainer)
            measures()

        loop._on_before_fetch = before_fetch
    watching.append(told)


def unwatch_fetches(trainer: Trainer, told: _Told) -> None:
    """Tell somebody no more; leaves the loop as it was when nobody else is told."""
    loop: Any = trainer.fit_loop.epoch_loop
    watching = _watching[loop]
    watching.remove(told)
    if not watching:
        del loop._on_before_fetch
