"""Where DeepSpeed is told of the engine: a factory is replaced; methods and readers are wrapped.

DeepSpeed has no plugin hook: an unknown key of its configuration is accepted and ignored. Configurations
without the key, and engines of other kinds, go through unchanged.
"""

from __future__ import annotations

import filecmp
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint, ds_to_universal
from deepspeed.runtime import engine as runtime
from deepspeed.runtime.state_dict_factory import SDLoaderBase
from deepspeed.utils import zero_to_fp32

from ckpt_core import ConfigError
from ckpt_deepspeed.choosing import choose, is_missing, together
from ckpt_deepspeed.engine import CkptCoreEngine, Saving, engine_of
from ckpt_deepspeed.roots import ROOTS
from ckpt_deepspeed.settings import KEY, plain, section_of
from ckpt_deepspeed.tags import AgreedTag, agreed

_log = logging.getLogger("ckpt_deepspeed")
_MARK = "_ckpt_deepspeed"
_SAID = "_ckpt_deepspeed_said"
_READERS = (
    "get_fp32_state_dict_from_zero_checkpoint",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "load_state_dict_from_zero_checkpoint",
)
_WEIGHTS = _READERS[0]
_SCRIPTS = tuple(Path(zero_to_fp32.__file__).parent.glob("zero_to_*.py"))
_GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")
"""Where DeepSpeed's optimizers keep the parameters of the model."""

_NO_ENGINE = (
    "ZeRO 3 without an optimizer: DeepSpeed gives such an engine no checkpoint engine, and cannot save it; "
    "nothing was written. If its weights change at all, save them yourself: "
    "deepspeed.zero.GatheredParameters gathers them"
)

_LOADED: ContextVar[str | None] = ContextVar("the tag that is being loaded", default=None)


def register() -> None:
    """Make the key `checkpoint_engine` known to DeepSpeed. Idempotent; importing the package does it.

    Raises:
        ConfigError: this release of DeepSpeed works in another way.
    """
    check_release()
    if hasattr(runtime.create_checkpoint_engine, _MARK):
        return
    runtime.create_checkpoint_engine = _dispatching(runtime.create_checkpoint_engine)
    engine = runtime.DeepSpeedEngine
    engine.save_checkpoint = _saving(engine.save_checkpoint)
    engine.load_checkpoint = _loading(engine.load_checkpoint)
    engine._take_model_step = _stepping(engine._take_model_step)
    engine.__del__ = _deleting(engine.__del__)
    if hasattr(engine, "_copy_recovery_script"):
        engine._copy_recovery_script = _copying(engine._copy_recovery_script)
    for name in _READERS:
        waiting = _reading(getattr(zero_to_fp32, name))
        for module in (zero_to_fp32, runtime):
            if hasattr(module, name):
                setattr(module, name, waiting)
    setattr(runtime, _WEIGHTS, _of_the_tag(getattr(runtime, _WEIGHTS)))
    SDLoaderBase.check_ckpt_list = _peeking(SDLoaderBase.check_ckpt_list)
    ds_to_universal.main = _reading(ds_to_universal.main)
    for kind in (DeepSpeedCheckpoint, ZeROCheckpoint):
        kind.__init__ = _reading(kind.__init__)


def attach(engine: Any, **settings: Any) -> None:
    """Let an engine that exists already save by ckpt_core; settings as in the configuration.

    Raises:
        ConfigError: a setting is wrong, or this is no training engine, or one that DeepSpeed cannot save.
    """
    register()
    if not isinstance(engine, runtime.DeepSpeedEngine):
        raise ConfigError(
            f"engine={type(engine).__name__} is no DeepSpeedEngine: pass what initialize() gave"
        )
    if engine.checkpoint_engine is None:
        raise ConfigError(_NO_ENGINE)
    engine.checkpoint_engine = _engine_for(engine._config, settings)


def check_release() -> None:
    """Be sure that DeepSpeed is one that this package knows.

    Raises:
        ConfigError: it is too old, or names that are used are gone.
    """
    numbers = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if numbers < (0, 18, 6):
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} is too old: ckpt_deepspeed needs 0.18.6 or newer"
        )
    missing = [name for name in ("create_checkpoint_engine",) if not hasattr(runtime, name)]
    methods = ("save_checkpoint", "load_checkpoint", "_take_model_step", "_configure_checkpointing")
    missing += [name for name in methods if not hasattr(runtime.DeepSpeedEngine, name)]
    if missing:
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} has no {missing[0]}: this release is not supported yet"
        )


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        given = getattr(config_params, "_param_dict", None) or {}
        section = section_of(given)
        if section is None:
            return original(config_params, *args, **kwargs)
        made = _engine_for(config_params, section)
        given[KEY] = plain(section)
        return made

    setattr(create_checkpoint_engine, _MARK, True)
    return create_checkpoint_engine


def _engine_for(config: Any, section: Mapping[str, Any]) -> CkptCoreEngine:
    """The engine of a section, beside what else a configuration says.

    Raises:
        ConfigError: a setting is wrong, or cannot be had with the rest.
    """
    made = engine_of(section)
    offload = config.zero_config.offload_optimizer
    if offload is not None and offload.device == "nvme":
        raise ConfigError(
            "offload_optimizer to nvme: DeepSpeed copies those files itself, which checkpoint_engine "
            '"ckpt_core" cannot commit with the others; remove the key checkpoint_engine'
        )
    if config.use_node_local_storage and made.settings.options.levels:
        raise ConfigError(
            "use_node_local_storage: files of several nodes have the same names, so no level can hold "
            "them together; remove the levels, or save to storage that all nodes share"
        )
    return made


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        client_state = {} if client_state is None else client_state
        ours = self.checkpoint_engine
        if not isinstance(ours, CkptCoreEngine):
            _check_not_ours(self)
            return original(self, save_dir, tag, client_state, *args, **kwargs)
        tag, moves = agreed(self, tag, moves=ours.moves_to(save_dir))
        known = Saving(
            step=self.global_steps,
            client_state=client_state,
            updated=_updated(self),
            is_restless=_is_restless(self),
            per_node=bool(self.use_node_local_storage()),
            moves=moves,
        )

        def saves() -> Any:
            with _compared(self, tag), _caught_up(self):
                return original(self, save_dir, tag, client_state, *args, **kwargs)

        return ours.saving(known, saves)

    return save_checkpoint


def _updated(engine: Any) -> list[torch.Tensor]:
    """The parameters that the optimizer holds; frozen ones, which the user's forward may change, are not."""
    optimizer = engine.optimizer
    groups = next((found for name in _GROUPS if (found := getattr(optimizer, name, None))), None)
    if groups is None:
        groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
    return [param for group in groups for param in group if param.requires_grad]


def _is_restless(engine: Any) -> bool:
    """Whether parameters change outside of the update: in a step behind it, or for generation."""
    zero = engine._config.zero_config
    return bool(
        getattr(zero, "zenflow", None)
        or getattr(zero.offload_optimizer, "super_offload", False)
        or engine._config.hybrid_engine.enabled
    )


@contextmanager
def _compared(engine: Any, tag: Any) -> Iterator[None]:
    """Within it, DeepSpeed does not compare a tag that is agreed on: that takes two collectives."""
    if isinstance(tag, AgreedTag):
        vars(engine)["_checkpoint_tag_validation"] = lambda tag: None
    try:
        yield
    finally:
        vars(engine).pop("_checkpoint_tag_validation", None)


@contextmanager
def _caught_up(engine: Any) -> Iterator[None]:
    """Where DeepSpeed raises on this rank, and perhaps on no other, all still meet at its last barrier.

    The others wait there: without it they would, for ever, or for the next collective of this one.
    """
    try:
        yield
    except Exception:
        if engine.checkpoint_engine.declines():
            # ZeRO-3 gathers here what it has partitioned before the save.
            if engine._optimizer_has_ckpt_event_epilogue():
                engine.optimizer.checkpoint_event_epilogue()
            deepspeed.comm.barrier()
        raise


def _check_not_ours(engine: Any) -> None:
    """An engine that was made before this package was imported has ignored the key. Called on every rank.

    Raises:
        ConfigError: it is one that DeepSpeed cannot save, and has the key. Before any collective: DeepSpeed
            raises on the first rank alone, and the others wait for it in its barrier.
    """
    if (getattr(engine, "config", None) or {}).get(KEY) is None:
        return
    if engine.checkpoint_engine is None:
        raise ConfigError(_NO_ENGINE)
    if hasattr(engine, _SAID):
        return
    setattr(engine, _SAID, True)
    warnings.warn(
        f"{KEY} is set, and this engine saves by {type(engine.checkpoint_engine).__name__}: import "
        f"ckpt_deepspeed before deepspeed.initialize(), or call ckpt_deepspeed.attach(engine)",
        stacklevel=3,
    )


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(
        self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        ours = self.checkpoint_engine
        if not isinstance(ours, CkptCoreEngine):
            ROOTS.wait_ended(load_dir)  # one that is, may have saved there in this process
            return original(self, load_dir, tag, *args, **kwargs)
        ROOTS.wait_staged()
        together(lambda: ROOTS.wait(load_dir))
        if self.load_universal_checkpoint():
            found = original(self, load_dir, tag, *args, **kwargs)
            ours.at(load_dir)
            return found
        per_node = bool(self.use_node_local_storage())
        # A root that is open here is locked, and has what was saved to it.
        levels = () if per_node or ROOTS.has(load_dir) else ours.settings.options.levels
        if ours.settings.verify or (levels and is_missing(load_dir, tag)):
            tag = choose(load_dir, tag, per_node=per_node, levels=levels)
        before = _LOADED.get()
        try:
            _LOADED.set(None if tag is None else str(tag))
            # Whoever has a root open has it locked.
            with ours.mappings.while_loading(allowed=ROOTS.has(load_dir)):
                found = original(self, load_dir, tag, *args, **kwargs)
            ours.at(load_dir)
            return found
        finally:
            _LOADED.set(before)

    return load_checkpoint


def _peeking(original: Callable[..., Any]) -> Callable[..., Any]:
    # DeepSpeed loads the model's file for one number in it, and then once more.
    @functools.wraps(original)
    def check_ckpt_list(self: Any) -> None:
        ours = self.checkpoint_engine
        with ours.peeking() if isinstance(ours, CkptCoreEngine) else nullcontext():
            original(self)

    return check_ckpt_list


def _of_the_tag(original: Callable[..., Any]) -> Callable[..., Any]:
    # ZeRO-3 without optimizer states takes its weights from what `latest` names, whichever tag it loads:
    # not the one that was asked for, or that was chosen in place of a damaged one.
    @functools.wraps(original)
    def reader(checkpoint_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(checkpoint_dir, _LOADED.get() if tag is None else tag, *args, **kwargs)

    return reader


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    # Pipeline engines update without asking the checkpoint engine for anything before.
    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.checkpoint_engine, CkptCoreEngine):
            ROOTS.wait_staged()
        return original(self, *args, **kwargs)

    return _take_model_step


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    # DeepSpeed copies these scripts anew in each save. A file that is cut waits for the filesystem's journal,
    # which our writers keep busy by then: 20 ms of the 35 that a small save took, on every rank.
    @functools.wraps(original)
    def _copy_recovery_script(self: Any, save_path: Any) -> None:
        ours = isinstance(self.checkpoint_engine, CkptCoreEngine)
        if ours and all(_is_there(script, Path(save_path)) for script in _SCRIPTS):
            return
        try:
            original(self, save_path)
        except OSError as exc:
            if not ours:
                raise
            # The first rank alone copies them, and the others wait for it in the barrier behind.
            _log.warning("DeepSpeed's scripts could not be copied to %s: %s", save_path, exc)

    return _copy_recovery_script


def _is_there(script: Path, folder: Path) -> bool:
    copy = folder / script.name
    try:
        return os.access(copy, os.X_OK) and filecmp.cmp(script, copy, shallow=False)
    except OSError:
        return False


def _deleting(original: Callable[..., Any]) -> Callable[..., Any]:
    # DeepSpeed destroys an engine here. The collector calls it on any thread and in the middle of anything,
    # of a save by another engine too: waiting for that one would never end. `destroy()` itself waits.
    @functools.wraps(original)
    def __del__(self: Any) -> None:
        if isinstance(self.__dict__.get("checkpoint_engine"), CkptCoreEngine):
            self.__dict__["checkpoint_engine"] = None
        original(self)

    return __del__


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reader of this process, perhaps on one rank alone, waits for what this process still writes."""

    @functools.wraps(original)
    def reader(*args: Any, **kwargs: Any) -> Any:
        ROOTS.wait_ended()
        return original(*args, **kwargs)

    return reader
