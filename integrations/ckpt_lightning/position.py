"""Where training stands in its data and its random numbers, kept exactly and found again.

Loaders that have a state (`ResumableLoader`, `StatefulDataLoader`) are saved by Lightning itself. Any other
one is *replayed*: the generators are set to what they were when the epoch began, a new iterator is made,
and the batches that training has had already are fetched once more and dropped. That is exact for every
deterministic loader, workers and their random augmentation included; it costs the reading of those batches.

When generators are put back, in the order of Lightning's hooks:

    on_fit_start           those of the first process: loaders and the first iterator are made afterwards
    on_train_start         mid-epoch: the iterator stands; replay, if need be; then those of the snapshot
    on_train_epoch_start   between epochs: those of the snapshot; a new iterator is made afterwards, as then
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import rank_zero_info

from ckpt_core import RngState
from ckpt_lightning.texts import Teller

_NOT_EXACT = (
    "this resume is not exact: it begins the epoch's data anew, since the training loaders differ in kind, "
    "or the training step fetches by itself (dataloader_iter). Use ckpt_core.data.ResumableLoader for all"
)
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class DataPosition:
    """Remembers how the running epoch began. Used on the training thread, by the callback's hooks."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._fit_rng: dict[str, Any] = {}
        self._begin: dict[str, Any] = {}
        self._fetch_rng: dict[str, Any] = {}
        self._loader_states: list[Any] = []

    # -- while training --------------------------------------------------------------------------

    def fit_begins(self) -> None:
        """Training starts from scratch; loaders are made soon. Called in on_fit_start."""
        self._fit_rng = RngState().state_dict()

    def epoch_begins(self, trainer: Trainer) -> None:
        """Called in on_train_epoch_start."""
        loop = trainer.fit_loop
        resuming = getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        # Lightning has made the first iterator before this hook, and makes later ones after it.
        remade = trainer.current_epoch > 0 and not resuming
        generators = _generator_states(trainer) if remade else []
        self._begin = {"remade": remade, "rng": RngState().state_dict(), "generators": generators}
        self._fetch_rng = {}

    def next_is_fetched(self, trainer: Trainer) -> None:
        """A batch is fetched soon. Called when everything of the batch before is over and captured."""
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is not None and fetcher.length is None:
            # It is the one after the next, whose augmentation draws now what it will be trained with later.
            self._fetch_rng = RngState().state_dict()

    def extras(self, trainer: Trainer, *, boundary: bool) -> dict[str, Any]:
        """For the tree of a snapshot."""
        return {
            "fit_rng": self._fit_rng,
            "epoch_begin": {} if boundary else self._begin,
            "fetch_rng": {} if boundary else self._fetch_rng,
            "generators": _generator_states(trainer),
        }

    def settle_boundary(self, trainer: Trainer, tree: dict[str, Any]) -> None:
        """Drop the loader states of an epoch that is over, where loading them would end the next one.

        Lightning never asks for the batch after the last one, so a StatefulDataLoader does not know that it
        is at its end; without a state it begins the next epoch, with the generators as they are.
        """
        if any(is_torchdata(loader) for loader in loaders(trainer)):
            tree["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    # -- on resume -------------------------------------------------------------------------------

    def note(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being loaded. Called in on_load_checkpoint, before Lightning drops it."""
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._loader_states = fit_loop.get("state_dict", {}).get("combined_loader", [])

    def before_loaders(self, saved: dict[str, Any]) -> None:
        """Loaders are made as they were by the first process. Called in on_fit_start."""
        self._fit_rng = saved["fit_rng"]
        if self._fit_rng:
            RngState().load_state_dict(self._fit_rng)

    def after_iterator(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Mid-epoch: go to the batch that comes next. Called in on_train_start."""
        self._begin = saved["epoch_begin"]
        if self._begin:
            self._to_next_batch(trainer, saved)
        RngState().load_state_dict(saved["rng"])

    def at_boundary(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Between epochs. Called in on_train_epoch_start, where the snapshot was taken."""
        RngState().load_state_dict(saved["rng"])
        _set_generators(trainer, saved["generators"])

    # -- inside ----------------------------------------------------------------------------------

    def _to_next_batch(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        stateful = [is_stateful(loader) for loader in loaders(trainer)]
        epoch: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        told = [_set_epoch(loader, epoch) for loader in loaders(trainer)]
        if not stateful or trainer.fit_loop._data_fetcher is None:
            return
        if all(stateful):
            _set_generators(trainer, saved["generators"])
            if any(told):
                self._reload(trainer)
        elif any(stateful) or isinstance(
            trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher
        ):
            self._teller.once(_NOT_EXACT)
        else:
            self._replay(trainer, saved["fetch_rng"])

    def _reload(self, trainer: Trainer) -> None:
        """Make the iterator again: Lightning made it before it told the samplers the epoch."""
        combined = trainer.fit_loop._combined_loader
        fetcher = trainer.fit_loop._data_fetcher
        if self._loader_states and combined is not None and fetcher is not None:
            combined._load_state_dicts(self._loader_states)
            iter(fetcher)
        self._loader_states = []

    def _replay(self, trainer: Trainer, fetch_rng: dict[str, Any]) -> None:
        """Fetch the batches of this epoch that training has had, and drop them."""
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        # A first iterator was made by Lightning, after `before_loaders`, as it was in the first process.
        RngState().load_state_dict(self._begin["rng"])
        if self._begin["remade"]:
            _set_generators(trainer, self._begin["generators"])
            iter(fetcher)
        # Without a length, Lightning's fetcher is one batch ahead, and must do that here too.
        source: Any = fetcher if fetcher.length is None else fetcher.iterator
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for left in reversed(range(done)):
            if fetch_rng and not left:
                RngState().load_state_dict(fetch_rng)
            next(source)
        if done:
            rank_zero_info(
                f"{done} batches of this epoch were fetched again, to go on with the next one"
            )
        # Lightning cannot know that the loader is where it should be, and would warn that it is not.
        warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)


def loaders(trainer: Trainer) -> list[Any]:
    """The training loaders; none before Lightning has asked for them."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def is_stateful(loader: Any) -> bool:
    """Whether Lightning saves this loader's state."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def is_torchdata(loader: Any) -> bool:
    """Whether it is a StatefulDataLoader, or derives from one."""
    return any(cls.__module__.partition(".")[0] == "torchdata" for cls in type(loader).__mro__)


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _set_epoch(loader: Any, epoch: int) -> bool:
    """Tell the samplers the epoch; whether one of them wanted to know."""
    told = False
    for sampler in _samplers(loader):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
            told = True
    return told


def _generators(trainer: Trainer) -> list[torch.Generator]:
    """The loaders' own generators, in a fixed order, each once."""
    found = [
        getattr(part, "generator", None)
        for loader in loaders(trainer)
        for part in (loader, *_samplers(loader))
    ]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _generator_states(trainer: Trainer) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(trainer)]


def _set_generators(trainer: Trainer, states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(trainer), states, strict=False):
        generator.set_state(state)
