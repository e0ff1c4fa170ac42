"""Lightning Fabric: its `save` and `load`, and a callback, over the engine.

    saving = FabricCheckpoint("ckpts", every_n_steps=50)
    fabric = Fabric(callbacks=[saving])
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    saving.attach(fabric)
    saving.restore(state)                                  # the newest whole step, in place
    while state["step"] < steps:
        ...
        state["step"] += 1
        fabric.call("on_train_batch_end", state=state)     # saves when one is due
    fabric.call("on_train_end", state=state)               # saves the last one; all is durable

Once attached, `fabric.save("ckpts", state)` adds a step behind training, and `fabric.load("ckpts", state)`,
or one of its step directories, restores one. Other paths are Fabric's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.wrappers import (
    _FabricDataLoader,
    _FabricModule,
    _unwrap_compiled,
    _unwrap_objects,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ckpt_core import (
    Checkpointer,
    CkptError,
    ConfigError,
    EveryNSteps,
    NotCommitted,
    Options,
    RngState,
    SaveHandle,
    TorchStore,
)
from ckpt_core.data import ResumableLoader
from ckpt_lightning.sharded import Open, root_and_step
from ckpt_lightning.triggers import Triggers

_RNG = "ckpt_lightning_rng"
"""Key of the generators in a step, beside the user's state."""


class FabricCheckpoint:
    """Saves a state of Fabric's behind training, and restores it. Used on every rank.

    Args:
        root: directory of this run's steps.
        every_n_steps, train_time_interval, policy: when `on_train_batch_end` saves, as for `AsyncCheckpoint`.
            With none of them, `save` and `fabric.save` do.
        step_key: the entry of the state that counts steps.
        trusted: load values that could run code.
        options: settings of the engine.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        train_time_interval: timedelta | float | None = None,
        policy: Any = None,
        step_key: str = "step",
        trusted: bool = False,
        options: Options | None = None,
    ) -> None:
        self.root = Options.checked_root(root)
        triggers = Triggers(every_n_steps, None, train_time_interval, policy)
        self._schedule = triggers.schedule(monitors=True)
        self._step_key = step_key
        self._trusted = trusted
        self._options = (options or Options()).or_places_from_env()
        self._checkpointer: Checkpointer | None = None
        self._last_step: int | None = None
        self._prepares = False

    def attach(self, fabric: Fabric) -> Self:
        """Open the root, and let `fabric.save` and `fabric.load` of it go through here.

        Called after `fabric.launch()`.

        Raises:
            ConfigError: it is attached already, or the strategy keeps states that only it can save.
            RootBusy, PersistError: as `Checkpointer`.
        """
        if self._checkpointer is not None:
            raise ConfigError(f"{self.root} is open already: attach once, or close() first")
        if isinstance(fabric.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise ConfigError(
                f"{type(fabric.strategy).__name__} keeps parts of the state that only it can save: use "
                f"ModelParallelStrategy (FSDP2) or DDPStrategy, or leave fabric.save as it is"
            )
        several = fabric.world_size > 1
        store = TorchStore.from_process_group() if several else None
        self._checkpointer = Checkpointer(self.root, self._options, coordination=store)
        self._prepares = _on_device(fabric)
        self._schedule.watch(self._checkpointer)
        if several and any(type(one) is not EveryNSteps for one in self._schedule.policies):
            # What a clock decides, the first rank decides for all; counts are equal anyway.
            self._schedule.agree = fabric.broadcast
        owner: Any = fabric
        owner.save = self._saving(fabric.save)
        owner.load = self._loading(fabric.load)
        return self

    # -- by hand ---------------------------------------------------------------------------------

    def save(self, state: dict[str, Any]) -> SaveHandle:
        """Start a save of `state`, and of the generators; returns before it is durable.

        Parameters and optimizer states are copied behind training: each optimizer step waits for that.

        Raises:
            ConfigError: the state has no count of steps, or something in it cannot be saved.
            CkptError: as `Checkpointer.save`.
        """
        step = state.get(self._step_key)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(
                f"state[{self._step_key!r}]={step!r} must be the number of steps so far: count it there, or "
                f"name the entry that does with step_key="
            )
        handle = self._open().save(step, self._tree(state))
        self._schedule.saved(step)
        self._last_step, self._prepares = step, False
        return handle

    def restore(self, state: dict[str, Any], *, step: int | None = None) -> int | None:
        """Put the newest whole step into `state`, generators included; its number, or None for none.

        Raises:
            StateMismatch: it is of another state; nothing was changed.
            CkptError: as `Checkpointer.restore`.
        """
        found = self._restored(state, step)
        return None if found is None else int(found[self._step_key])

    def wait(self) -> None:
        """Return when every save is durable.

        Raises:
            CkptError: one failed, and with on_error="raise" nobody was told yet.
        """
        self._open().wait()

    def close(self) -> None:
        """`wait`, and let the root go. Idempotent."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what `fabric.call` calls -----------------------------------------------------------------

    def on_train_batch_end(self, state: dict[str, Any]) -> None:
        """A step is over: save it if one is due."""
        if self._schedule.after_step(state[self._step_key]):
            self.save(state)
        elif self._prepares and state[self._step_key] != (self._last_step or 0):
            self._prepares = False
            # What is wrong, the first save tells.
            with suppress(CkptError):
                self._open().prepare(self._tree(state))

    def on_train_end(self, state: dict[str, Any]) -> None:
        """Training is over: save the last step, unless it was, and wait until all is durable."""
        if self._last_step != state[self._step_key]:
            self.save(state)
        self.wait()

    # -- inside ----------------------------------------------------------------------------------

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            raise ConfigError(f"{self.root} is not open: call attach(fabric) after fabric.launch()")
        return self._checkpointer

    def _tree(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**{key: _bare(value) for key, value in state.items()}, _RNG: RngState()}

    def _restored(self, state: dict[str, Any], step: int | None) -> dict[str, Any] | None:
        tree = Open(self._tree(state))
        found = self._open().restore(tree, step=step, trusted=self._trusted)
        if found is None:
            return None
        whole: dict[str, Any] = found.state
        for key in state:
            state[key] = _in_place(state[key], tree[key], whole[key])
        apply_to_collection(state, _FabricDataLoader, _count_epochs)
        self._last_step = found.step
        return {key: value for key, value in whole.items() if key != _RNG}

    def _looked_at(self, step: int | None) -> dict[str, Any] | None:
        found = self._open().restore(None, step=step, trusted=self._trusted)
        whole: dict[str, Any] = {} if found is None else found.state
        return {key: value for key, value in whole.items() if key != _RNG} or None

    def _saving(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(path: Any, state: dict[str, Any], filter: Any = None) -> None:
            if os.path.abspath(path) != str(self.root):
                original(path, state, filter)
            elif filter is not None:
                raise ConfigError(
                    "filter: a step holds the whole state; leave out of it what is not wanted"
                )
            else:
                self.save(state)

        return save

    def _loading(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def load(
            path: Any, state: dict[str, Any] | None = None, *args: Any, **options: Any
        ) -> dict[str, Any]:
            place = Path(os.path.abspath(path))
            if self.root not in (place, place.parent):
                return original(path, state, *args, **options)
            _, step = root_and_step(place)
            found = self._restored(state, step) if state else self._looked_at(step)
            if found is None:
                raise NotCommitted(f"{path} holds no committed step", path=place)
            return {key: value for key, value in found.items() if key not in (state or {})}

        return load


def _count_epochs(loader: Any) -> None:
    """Fabric tells a loader the number of its epoch, by a count that begins at 0 in each process."""
    if isinstance(loader._dataloader, ResumableLoader):
        loader._num_iter_calls = loader._dataloader.epoch


def _on_device(fabric: Fabric) -> bool:
    # In host memory nothing is page-locked, and the pages of a first save need not be there before it.
    return fabric.device.type != "cpu"


def _bare(value: Any) -> Any:
    """What Fabric has wrapped, at any depth; of DistributedDataParallel the module, with the user's names."""
    return _unwrap_objects(apply_to_collection(value, nn.Module, _bare_module))


def _bare_module(module: nn.Module) -> nn.Module:
    inner, _ = _unwrap_compiled(module)
    return inner.module if isinstance(inner, _FabricModule) else module


def _in_place(given: Any, bare: Any, found: Any) -> Any:
    """What was found, with live objects where the state has them, in containers too; `bare` was filled."""
    if _is_live(bare):
        return given
    if isinstance(bare, dict) and isinstance(found, dict):
        found.update(
            {key: _in_place(given[key], bare[key], found[key]) for key in bare if key in found}
        )
    elif type(bare) is type(found) in (list, tuple) and len(bare) == len(found):
        return type(bare)(map(_in_place, given, bare, found))
    return found


def _is_live(value: Any) -> bool:
    """Whether a value was filled in place."""
    return isinstance(value, Tensor | nn.Module) or hasattr(value, "load_state_dict")
