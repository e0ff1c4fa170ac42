"""A training loop of one's own with Accelerate: what `save_state` and `load_state` hold, behind training."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset

from ckpt_core import (
    Checkpointer,
    CkptError,
    ConfigError,
    OnError,
    Options,
    RngState,
    SaveHandle,
    TorchStore,
)
from ckpt_transformers.capture import Kept
from ckpt_transformers.settings import engine_options
from ckpt_transformers.texts import tell

_PRIVATE = ("custom", "loaders", "rng")
_BEGINS_ANEW = (
    "use_stateful_dataloader=True: a loader was left before its end, saved, and begins anew now; behind "
    "a restore of that save it goes on where it was left: read it to its end, or save while training is read"
)


class AcceleratorCheckpoint:
    """Saves and restores whatever an Accelerator has prepared, and what is registered with it.

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with AcceleratorCheckpoint(accelerator, "ckpts") as checkpoint:
            done = checkpoint.restore() or 0        # the newest whole step, in place
            ...
            checkpoint.save(step)                   # returns at once; durable behind the next steps

    Made on every rank, behind `prepare`. Each rank writes its share (DDP, FSDP2); nothing is gathered.

    Args:
        accelerator: has prepared models, optimizers, schedulers and loaders, and knows custom objects
            (`register_for_checkpointing`), whose tensors are each rank's own.
        root: directory of this run's steps.
        options: settings of the engine.
        levels, on_error: as `AsyncCheckpoint`.
        more: further arguments of `Checkpointer`, such as `on_sigterm="save"`.

    Attributes:
        checkpointer: the engine: `wait`, `steps`, `stop_requested`, ...

    Raises:
        ConfigError: DeepSpeed, Megatron or FSDP of version 1 keeps its states to itself.
        CkptError: as `Checkpointer`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | os.PathLike[str],
        *,
        options: Options | None = None,
        levels: Sequence[Any] | None = None,
        on_error: OnError | str = OnError.WARN,
        **more: Any,
    ) -> None:
        _check(accelerator)
        self._accelerator = accelerator
        settings = engine_options(Options() if options is None else options, on_error, levels)
        several = accelerator.num_processes > 1
        store = TorchStore.from_process_group() if several else None
        self.checkpointer = Checkpointer(root, settings, coordination=store, **more)
        self._several = several
        self._known = [_Order(loader) for loader in accelerator._dataloaders]
        self._begun = False
        self._follow_what_skips(accelerator)
        if _on_device(accelerator) and accelerator._optimizers:
            self._prepare_behind_a_step()

    def save(self, step: int) -> SaveHandle:
        """Start a save; called on every rank after the same step, when the gradients are used up.

        Raises:
            CkptError: as `Checkpointer.save`.
        """
        self._begun = True
        return self.checkpointer.save(step, self._tree(), per_rank=self._private)

    def restore(self, step: int | None = None) -> int | None:
        """Fill everything from the newest whole step, or this one; its number, or None without any.

        Loaders begin the epoch that they were in, in its order: `accelerator.skip_first_batches` skips what
        is done; stateful ones go on in it. Behind the last batch of an epoch that is the next one.

        Raises:
            CkptError: as `Checkpointer.restore`.
        """
        loaders = Kept()
        found = self.checkpointer.restore({**self._live(), "loaders": loaders}, step=step)
        if found is None:
            return None
        self._accelerator.step = found.state["step"]
        for order, place in zip(self._orders(), loaders.value["loaders"], strict=False):
            order.put_back(place)
        return found.step

    def close(self) -> None:
        """Finish what is in flight and let the root go. Idempotent."""
        self.checkpointer.close()

    def __enter__(self) -> AcceleratorCheckpoint:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.checkpointer.__exit__(kind, error, trace)

    def _follow_what_skips(self, accelerator: Any) -> None:
        """Accelerate's loader of the rest of an epoch is another one, of which the first hears nothing."""
        own = accelerator.skip_first_batches

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            rest = own(dataloader, num_batches)
            _check_rest(accelerator, dataloader, rest)
            for order in self._orders():
                order.follow(dataloader, rest)
            return rest

        accelerator.skip_first_batches = skip_first_batches

    def _prepare_behind_a_step(self) -> None:
        """When optimizers have their state: the first save finds memory that is page-locked."""
        last = self._accelerator._optimizers[-1]

        def prepare(*_: Any) -> None:
            hook.remove()
            if not self._begun:
                # What is wrong, the first save tells.
                with suppress(CkptError):
                    self.checkpointer.prepare(self._tree(), per_rank=self._private)

        # A compiled step traces nothing of it.
        prepare._torchdynamo_disable = True  # type: ignore[attr-defined]
        hook = getattr(last, "optimizer", last).register_step_post_hook(prepare)

    @property
    def _private(self) -> tuple[str, ...] | None:
        return _PRIVATE if self._several else None

    def _tree(self) -> dict[str, Any]:
        orders = self._orders()
        read = any(order.is_read for order in orders)
        loaders = Kept({"loaders": [order.place(others_read=read) for order in orders]})
        return {**self._live(), "loaders": loaders}

    def _orders(self) -> list[_Order]:
        """Of all loaders, those among them that were prepared since."""
        later = self._accelerator._dataloaders[len(self._known) :]
        self._known += [_Order(loader) for loader in later]
        return self._known

    def _live(self) -> dict[str, Any]:
        accelerator = self._accelerator
        tree = {
            "models": [
                accelerator.unwrap_model(model, keep_torch_compile=False)
                for model in accelerator._models
            ],
            "optimizers": [getattr(item, "optimizer", item) for item in accelerator._optimizers],
            "schedulers": [getattr(item, "scheduler", item) for item in accelerator._schedulers],
            "custom": list(accelerator._custom_objects),
            "step": accelerator.step,
            "rng": RngState(),
        }
        return tree if accelerator.scaler is None else {**tree, "scaler": accelerator.scaler}


def _on_device(accelerator: Accelerator) -> bool:
    return bool(accelerator.device.type != "cpu")


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or (
        kind == DistributedType.FSDP and not accelerator.is_fsdp2
    ):
        raise ConfigError(
            f"{kind.value} keeps its states where only it can save them: use DDP or FSDP of version 2, or "
            f"for DeepSpeed the key checkpoint_engine of its configuration (docs/deepspeed.md)"
        )


def _check_rest(accelerator: Accelerator, loader: Any, rest: Any) -> None:
    rank = accelerator.process_index
    if getattr(loader, "use_stateful_dataloader", False):
        tell(
            "use_stateful_dataloader=True: behind restore() a loader goes on by itself where it was, and "
            "skip_first_batches knows nothing of it: iterate over the loader",
            rank=rank,
        )
    alone = accelerator.num_processes < 2 or getattr(rest, "split_batches", True)
    # Of an IterableDataset Accelerate skips those of all ranks.
    if not alone and not isinstance(rest.dataset, IterableDataset):
        tell(
            "dispatch_batches=True: what skip_first_batches skips are batches of one rank: where each rank "
            "has done n, give it n * num_processes, or set split_batches=True as well",
            rank=rank,
        )


@dataclass(eq=False)
class _Pass:
    """One time through a loader, of `epoch`: from what it `began` with, or from what a restore has `loaded`.

    Accelerate lets what it reads go with the loop, so that `reads` then answers None: a loop that has come to
    the end of the epoch has counted it by then, and one that was left has not.
    """

    epoch: int
    loaded: dict[str, Any] | None = None
    loader: Any = None
    began: dict[str, Any] = field(default_factory=dict)
    reads: Callable[[], Any] = lambda: None
    saved_left: bool = False


class _Order:
    """Where a loader stands: `_pass` tells it, None while nobody has begun to read it.

    A sampler without a seed for each epoch draws its order from a generator: on several ranks from one that
    all have alike, else from the loader's or torch's own. As each epoch begins they are noted, so that the
    epoch can begin again.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._pass: _Pass | None = None
        # A stateful one has its first epoch's iterator, which has drawn its seed, since it was made.
        self._made = self._stateful = getattr(loader, "use_stateful_dataloader", False)
        self._watch(loader)

    def follow(self, loader: Any, rest: Any) -> None:
        """If it is this loader of which `rest` skips batches: the epoch is over where that ends."""
        if loader is not self._loader or not hasattr(rest, "iteration"):
            return
        self._watch(rest)
        own = rest.end

        def end() -> None:
            self._loader.iteration = rest.iteration
            own()

        rest.end = end

    @property
    def is_read(self) -> bool:
        return self._pass is not None and self._pass.reads() is not None

    def place(self, *, others_read: bool) -> dict[str, Any]:
        """The epoch that it is in, or that is next, as behind the last batch of one."""
        epoch, here = getattr(self._loader, "iteration", 0), self._pass
        # No state: one of its end would draw for the epoch that is over.
        anew = {"epoch": epoch, "state": {} if self._stateful else None, **self._drawn}
        if here is None:
            return {**anew, "state": self._state}
        if here.loaded is not None:
            return here.loaded
        if here.epoch != epoch:
            return anew
        if here.loader.end_of_dataloader:
            # It counts on when it is asked for another batch.
            return {**anew, "epoch": epoch + self.is_read}
        goes_on = {"epoch": epoch, "state": self._state, **here.began}
        if self.is_read:
            return goes_on
        # One that was left is gone on with, or begins anew: what skips batches tells, and is none here.
        if not self._stateful:
            return {**goes_on, "left": anew["generator"]}
        here.saved_left = not others_read
        return anew if others_read else goes_on

    def put_back(self, place: dict[str, Any]) -> None:
        """Let it begin that epoch."""
        if hasattr(self._loader, "iteration"):
            # A sampler may take the epoch's seed from there; a dispatcher that skips tells it none.
            self._loader.set_epoch(place["epoch"])
        self._pass = _Pass(place["epoch"], place)
        if place["state"] is not None:
            self._loader.load_state_dict(place["state"])
            self._made = place.get("made")
            if self._made:
                with torch.random.fork_rng(devices=[]):
                    self._loader.base_dataloader.state_dict()
        self._set_generator(place.get("left", place.get("generator")))

    @property
    def _state(self) -> Any:
        return self._loader.state_dict() if self._stateful else None

    @property
    def _drawn(self) -> dict[str, Any]:
        generator = self._generator
        return {
            "generator": None if generator is None else generator.get_state(),
            "made": self._made,
        }

    @property
    def _generator(self) -> Any:
        loader = self._loader
        if isinstance(loader, DataLoaderDispatcher):
            # The one that it was given, its sampler alone still has.
            drawn_from = getattr(loader.get_sampler(), "generator", None)
            return drawn_from if isinstance(drawn_from, torch.Generator) else None
        alike = getattr(loader, "synchronized_generator", None)
        return getattr(loader, "generator", None) if alike is None else alike

    def _set_generator(self, state: torch.Tensor | None) -> None:
        if state is not None and self._generator is not None:
            self._generator.set_state(state)

    def _watch(self, loader: Any) -> None:
        """Note generators as it begins: behind the exchange that makes them equal, before it draws."""
        if not hasattr(loader, "begin"):
            return
        begin, read = loader.begin, loader.base_dataloader.__iter__

        def begin_pass() -> None:
            self._begin(loader)
            begin()

        def read_pass() -> Any:
            batches = (batch for batch in read())
            if self._pass is not None:
                self._pass.reads = weakref.ref(batches)
            return batches

        loader.begin, loader.base_dataloader.__iter__ = begin_pass, read_pass

    def _begin(self, loader: Any) -> None:
        last, owed = self._pass, {}
        if last is not None and last.saved_left:
            tell(_BEGINS_ANEW, rank=PartialState().process_index)
        # The loader itself begins anew, and draws anew, unless it goes on by itself.
        if last is not None and last.loaded and (self._stateful or loader is not self._loader):
            owed = last.loaded
        if owed.get("torch") is None:
            began = {**self._drawn, "torch": torch.get_rng_state()}
        else:
            began = {name: owed.get(name) for name in ("generator", "torch", "made")}
            self._set_generator(began["generator"])
            _draw_again(loader, began["torch"])
        self._made = False
        self._pass = _Pass(self._loader.iteration, loader=loader, began=began)


def _draw_again(loader: Any, drawn: torch.Tensor) -> None:
    """Let it draw its order as it did; behind its first batch torch's generator is where it was."""
    now = torch.get_rng_state()
    torch.set_rng_state(drawn)
    dispatches = isinstance(loader, DataLoaderDispatcher)
    names = ("_fetch_batches",) if dispatches else ("_update_state_dict", "end")
    own = {name: getattr(loader, name) for name in names}

    def put_back(name: str, *given: Any) -> Any:
        for each in names:
            setattr(loader, each, own[each])
        first = own[name](*given)
        torch.set_rng_state(now)
        return first

    for name in names:
        setattr(loader, name, partial(put_back, name))
