"""Where training stands in its data and its random numbers, kept exactly and found again.

Loaders that have a state (`ResumableLoader`, `StatefulDataLoader`) are saved by Lightning itself. Any other
one is *replayed*: the generators are set to what they were when the epoch began, a new iterator is made,
and the batches that training has had already are fetched once more and dropped. That is exact for every
deterministic loader, workers and their random augmentation included; it costs the reading of those batches.
A shorter loader of several begins anew within the epoch, and draws its order from the generators of then.

When generators are put back, in the order of Lightning's hooks:

    on_fit_start           those from which loaders were made: they and the first iterator are made afterwards
    on_train_start         mid-epoch: the iterator stands; replay, if need be; then those of the snapshot
    on_train_epoch_start   between epochs: those of the snapshot, before all callbacks, which draw again; a
                           new iterator is made afterwards, as then
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from ckpt_core import RngState
from ckpt_core.data import ResumableLoader
from ckpt_lightning.loops import call_before_batches, unwatch_fetches, watch_fetches
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
        self._watched: Trainer | None = None
        self._own_hook = False
        self._cycles: dict[int, dict[str, Any]] = {}
        self._loader_states: list[Any] = []
        self._remakes = self._remade = False

    # -- while training --------------------------------------------------------------------------

    def fit_begins(self) -> None:
        """Training starts from scratch; loaders are made soon. Called in on_fit_start."""
        self._fit_rng = RngState().state_dict()

    def epoch_begins(self, trainer: Trainer) -> None:
        """Called in on_train_epoch_start."""
        loop = trainer.fit_loop
        resuming = getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        # Lightning has made the first iterator before this hook, and makes later ones after it.
        self._remade = trainer.current_epoch > 0 and not resuming
        self._fetch_rng, self._cycles = {}, {}
        self._note_begin(trainer)
        if is_overridden("on_train_epoch_start", trainer.lightning_module):
            call_before_batches(trainer, self._note_begin)

    def _note_begin(self, trainer: Trainer) -> None:
        """Those from which the epoch's order is drawn: again behind the module's own hook, which may draw."""
        generators = _generator_states(loaders(trainer)) if self._remade else []
        rng = RngState().state_dict()
        self._begin = {"remade": self._remade, "rng": rng, "generators": generators}

    def epoch_ends(self, trainer: Trainer) -> None:
        """Everything of the epoch that may draw is over. Called in on_train_epoch_end."""
        loop = trainer.fit_loop
        every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if every and trainer.current_epoch + 1 - loop._last_train_dl_reload_epoch >= every:
            # Lightning makes loaders anew before the next hook.
            self._fit_rng = RngState().state_dict()

    def watch(self, trainer: Trainer, *, own_hook: bool) -> None:
        """Note what each fetch of training begins with, from now on. Called in on_train_start.

        Args:
            own_hook: the module has one behind a batch or a validation, which may draw behind ours.
        """
        self._watched, self._own_hook = trainer, own_hook
        watch_fetches(trainer, self._fetches)

    def unwatch(self) -> None:
        """Note no more fetches. Idempotent."""
        if self._watched is not None:
            unwatch_fetches(self._watched, self._fetches)
            self._watched = None

    @property
    def fetch_rng(self) -> dict[str, Any]:
        """Those with which the newest batch was fetched, where there is an own hook."""
        return self._fetch_rng

    def rng_behind(self, fetch_rng: dict[str, Any]) -> dict[str, Any]:
        """Those with which the batch is fetched that follows one fetched with `fetch_rng`."""
        return RngState().state_dict() if self._fetch_rng is fetch_rng else self._fetch_rng

    def _fetches(self, trainer: Trainer) -> None:
        # Whatever draws between two batches has drawn by now.
        if self._own_hook or _is_ahead(trainer):
            self._fetch_rng = RngState().state_dict()
        self._note_cycle(trainer)

    def extras(self, trainer: Trainer, *, boundary: bool) -> dict[str, Any]:
        """For the tree of a snapshot."""
        return {
            "fit_rng": self._fit_rng,
            "epoch_begin": {} if boundary else self._begin,
            # Of the batch that is ahead: its augmentation has drawn what it will be trained with later.
            "fetch_rng": self._fetch_rng if _is_ahead(trainer) and not boundary else {},
            "cycles": {} if boundary else self._cycles,
            "generators": _generator_states(loaders(trainer)),
            "val_generators": _generator_states(_val_loaders(trainer)),
            "loaded_in": _loaded_in(trainer),
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
        """Loaders are made as those that the snapshot was trained with. Called in on_fit_start."""
        self._fit_rng = saved["fit_rng"]
        if self._fit_rng:
            RngState().load_state_dict(self._fit_rng)

    def after_iterator(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Loaders stand. Mid-epoch: go to the batch that comes next. Called in on_train_start."""
        self._find_loaded(trainer, saved)
        if saved["boundary"]:
            # Saved at the end of a run; then they are made after this hook, from these generators.
            self._remakes = bool(trainer.fit_loop._should_reload_train_dl)
            if self._remakes:
                RngState().load_state_dict(saved["rng"])
            return
        self._begin = saved["epoch_begin"]
        self._fetch_rng, self._cycles = saved["fetch_rng"], saved.get("cycles", {})
        if self._begin:
            self._to_next_batch(trainer, saved)
        RngState().load_state_dict(saved["rng"])

    def at_boundary(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Between epochs. Called in on_train_epoch_start, before all callbacks, as the snapshot was taken."""
        if not self._remakes:
            RngState().load_state_dict(saved["rng"])
            _set_generators(loaders(trainer), saved["generators"])
        self._remakes = False

    # -- inside ----------------------------------------------------------------------------------

    def _find_loaded(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Loaders are those of the epochs in which they were made; older steps do not tell these."""
        made, val_made = saved.get("loaded_in", (None, None))
        if made is not None:
            trainer.fit_loop._last_train_dl_reload_epoch = made
        if val_made is None or not trainer.enable_validation:
            return
        val_loop: Any = trainer.fit_loop.epoch_loop.val_loop
        if val_loop._combined_loader is None:
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
        val_loop._last_val_dl_reload_epoch = val_made
        _set_generators(_val_loaders(trainer), saved["val_generators"])

    def _note_cycle(self, trainer: Trainer) -> None:
        """Remember the generators where a shorter loader begins anew with this batch."""
        lengths = _cycled_lengths(trainer)
        number = _fetched(trainer) if lengths else 0
        if number and any(number % length == 0 for length in lengths):
            # Of each loader the newest one: nobody trains with what earlier ones draw.
            newest = {number - number % length for length in lengths}
            kept = {begin: rng for begin, rng in self._cycles.items() if begin in newest}
            self._cycles = {**kept, number: RngState().state_dict()}

    def _to_next_batch(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        stateful = [is_stateful(loader) for loader in loaders(trainer)]
        epoch: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        told = [_set_epoch(loader, epoch) for loader in loaders(trainer)]
        if not stateful or trainer.fit_loop._data_fetcher is None:
            return
        if all(stateful):
            _set_generators(loaders(trainer), saved["generators"])
            if any(told):
                self._reload(trainer)
            _keep_apart(trainer, epoch)
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
            _set_generators(loaders(trainer), self._begin["generators"])
            iter(fetcher)
        # Without a length, Lightning's fetcher is one batch ahead, and must do that here too.
        source: Any = fetcher if _is_ahead(trainer) else fetcher.iterator
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for left in reversed(range(done)):
            if (number := _fetched(trainer)) in self._cycles:
                RngState().load_state_dict(self._cycles[number])
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


def _is_ahead(trainer: Trainer) -> bool:
    """Whether Lightning fetches each batch before the last one is trained with: it knows no length."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is None


def _val_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def _loaded_in(trainer: Trainer) -> tuple[int | None, int | None]:
    """The epochs in which training's and validation's loaders were made; None for none."""
    loop = trainer.fit_loop
    made: Any = loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch
    train, val = (epoch if isinstance(epoch, int) else None for epoch in made)
    return train, val


def _fetched(trainer: Trainer) -> int:
    """How many batches the iterator has given."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None and combined._iterator is not None
    return combined._iterator._idx


def _cycled_lengths(trainer: Trainer) -> list[int]:
    """Of loaders that begin anew within an epoch, since another one is longer; empty if none does."""
    combined = trainer.fit_loop._combined_loader
    if combined is None or combined._mode != "max_size_cycle" or len(combined.flattened) < 2:
        return []
    lengths = [sized_len(loader) or sys.maxsize for loader in combined.flattened]
    return [length for length in lengths if length < max(lengths)]


def _keep_apart(trainer: Trainer, epoch: int) -> None:
    """Loaders with a state that are in another epoch than the trainer, or at their end, stay there."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None and combined._iterator is not None
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    for number, loader in enumerate(combined.flattened):
        if isinstance(loader, ResumableLoader) and loader.epoch != epoch:
            _overhear_epoch(loader.sampler)
        if combined._mode == "max_size" and done >= (sized_len(loader) or sys.maxsize):
            combined._iterator.iterators[number] = iter(())


def _overhear_epoch(sampler: Any) -> None:
    """Lightning tells samplers the trainer's epoch once more after on_train_start: that call does nothing."""

    def set_epoch(epoch: int) -> None:
        del sampler.set_epoch

    sampler.set_epoch = set_epoch


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
    if isinstance(loader, ResumableLoader):
        return True  # Its state tells it; that may be a later one, where it has begun anew.
    told = False
    for sampler in _samplers(loader):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
            told = True
    return told


def _generators(found: list[Any]) -> list[torch.Generator]:
    """The loaders' own generators, in a fixed order, each once."""
    owned = [
        getattr(part, "generator", None)
        for loader in found
        for part in (loader, *_samplers(loader))
    ]
    return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())


def _generator_states(found: list[Any]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(found)]


def _set_generators(found: list[Any], states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(found), states, strict=False):
        generator.set_state(state)
