"""Where DeepSpeed is told of the engine: one factory is replaced, and four functions are wrapped.

DeepSpeed has no plugin hook: an unknown key of its configuration is accepted and ignored. Configurations
without the key, and engines of other kinds, go through unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime import engine as runtime
from deepspeed.utils import zero_to_fp32

from ckpt_core import ConfigError
from ckpt_deepspeed.choosing import choose
from ckpt_deepspeed.early import Early, tensors_of
from ckpt_deepspeed.engine import LATEST, CkptCoreEngine, engine_of
from ckpt_deepspeed.roots import ROOTS
from ckpt_deepspeed.settings import section_of

_MARK = "_ckpt_deepspeed"
_READERS = (
    "get_fp32_state_dict_from_zero_checkpoint",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "load_state_dict_from_zero_checkpoint",
)


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
    for name in _READERS:
        waiting = _reading(getattr(zero_to_fp32, name))
        for module in (zero_to_fp32, runtime):
            if hasattr(module, name):
                setattr(module, name, waiting)


def attach(engine: Any, **settings: Any) -> None:
    """Let an engine that exists already save by ckpt_core; settings as in the configuration.

    Raises:
        ConfigError: a setting is wrong, or this is no training engine.
    """
    register()
    if not isinstance(engine, runtime.DeepSpeedEngine):
        raise ConfigError(
            f"engine={type(engine).__name__} is no DeepSpeedEngine: pass what initialize() gave"
        )
    engine.checkpoint_engine = engine_of(settings)


def check_release() -> None:
    """Be sure that DeepSpeed is one that this package knows.

    Raises:
        ConfigError: it is too old, or names that are used are gone.
    """
    numbers = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if numbers < (0, 18, 4):
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} is too old: ckpt_deepspeed needs 0.18.4 or newer"
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
        section = section_of(getattr(config_params, "_param_dict", None) or {})
        if section is None:
            return original(config_params, *args, **kwargs)
        return engine_of(section)

    setattr(create_checkpoint_engine, _MARK, True)
    return create_checkpoint_engine


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
            return original(self, save_dir, tag, client_state, *args, **kwargs)
        if self.zero_nvme_offload_optimizer():
            raise ConfigError(
                "offload_optimizer to nvme: DeepSpeed copies those files itself, which checkpoint_engine "
                '"ckpt_core" cannot commit with the others; remove the key checkpoint_engine'
            )
        changing = [*self.module.buffers(), *tensors_of(client_state)]
        with ours.saving(
            step=self.global_steps,
            early=Early(changing),
            per_node=bool(self.use_node_local_storage()),
        ):
            return original(self, save_dir, tag, client_state, *args, **kwargs)

    return save_checkpoint


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(
        self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        ours = self.checkpoint_engine
        if isinstance(ours, CkptCoreEngine):
            ROOTS.wait_staged()
            ROOTS.wait(load_dir)
            if ours.settings.verify and not self.load_universal_checkpoint():
                tag = choose(str(load_dir), tag, _latest(load_dir))
        return original(self, load_dir, tag, *args, **kwargs)

    return load_checkpoint


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    # Pipeline engines update without asking the checkpoint engine for anything before.
    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.checkpoint_engine, CkptCoreEngine):
            ROOTS.wait_staged()
        return original(self, *args, **kwargs)

    return _take_model_step


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reader of this process waits for what this process still writes."""

    @functools.wraps(original)
    def reader(*args: Any, **kwargs: Any) -> Any:
        ROOTS.wait()
        return original(*args, **kwargs)

    return reader


def _latest(load_dir: Any) -> str | None:
    try:
        return Path(load_dir, LATEST).read_text().strip()
    except FileNotFoundError:
        return None
