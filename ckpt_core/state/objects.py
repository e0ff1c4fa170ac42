"""What must be known about live modules and optimizers to restore them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ckpt_core.state.special import is_uninitialized

_METHODS = (
    "load_state_dict",
    "_load_from_state_dict",
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


_FSDP2 = "torch.distributed.fsdp._fully_shard."
"""Its hooks free gathered parameters, as `state_dict()` has already done, and note replaced ones."""


def needs_load(module: Module) -> bool:
    """Whether filling the module's tensors might not be all that its `load_state_dict` does.

    Conservative: any hook, any extra state and any override outside torch counts; FSDP2's do not.
    """
    return any(_is_custom(part) for part in module.modules())


def _is_custom(module: Module) -> bool:
    if any(map(_is_foreign, (getattr(module, hooks, None) for hooks in _HOOKS))):
        return True
    cls = type(module)
    for name in _METHODS:
        owner = next((base for base in cls.__mro__ if name in vars(base)), Module)
        extra = name.endswith("extra_state") and owner is not Module
        if extra or name in vars(module) or owner.__module__.partition(".")[0] != "torch":
            return True
    return False


def _is_foreign(hooks: dict[int, Any] | None) -> bool:
    found = hooks.values() if hooks else ()
    return not all(str(getattr(hook, "__module__", "")).startswith(_FSDP2) for hook in found)


def parameters_of(optimizer: Optimizer) -> dict[Any, Tensor]:
    """Each parameter that has a shape, by the number that `state_dict` gives it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        number: parameter
        for number, parameter in enumerate(parameters)
        if not is_uninitialized(parameter)
    }
