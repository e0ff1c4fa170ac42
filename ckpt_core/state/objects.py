"""What must be known about live modules and optimizers to restore them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ckpt_core.state.distributed import is_distributed, local_of
from ckpt_core.state.memory import is_gone
from ckpt_core.state.quiet import quietly
from ckpt_core.state.special import decompose, is_uninitialized

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


_STAND_IN_BYTES = 64 * 1024

_LIKE_PARAMETER = (
    "exp_avg exp_avg_sq exp_inf max_exp_avg_sq momentum_buffer square_avg acc_delta sum ax"
    " grad_avg prev step_size variance".split()
)
_Shape = tuple[int, ...]
_KEPT: dict[str, Callable[[_Shape], _Shape]] = {
    **dict.fromkeys(_LIKE_PARAMETER, lambda shape: shape),
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, *shape[-1:]),
}
"""Shapes of the tensors that torch's optimizers keep, by their names, from that of the parameter."""

_FLAT = frozenset({"d", "prev_flat_grad"})
"""Names of those that LBFGS keeps for the first parameter, of all of them together."""


def needs_load(module: Module, state: Any) -> bool:
    """Whether filling the tensors of its `state_dict()` might not be all that its load does.

    Conservative: any hook, any extra state, any override outside torch counts (FSDP2's do not), and,
    wherever the class comes from, anything in `state` that is not the module's own live memory:
    filling a copy, such as the weights that a quantized module unpacks, would change nothing.
    """
    return any(map(_is_custom, module.modules())) or not is_live(module, state)


def is_live(module: Module, state: Any) -> bool:
    """Whether `state`, what `state_dict()` gave, is nothing but memory of parameters and buffers."""
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        return False
    own = {storage for tensor in _tensors(module) for storage in _storages(tensor)}
    return all(own.issuperset(_storages(tensor)) for tensor in state.values())


def is_extra(key: object) -> bool:
    """Whether what a `state_dict()` has under this name is the extra state of a module."""
    return str(key).rpartition(".")[2] == "_extra_state"


def to_fill(module: Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What of a module to fill, where its `state_dict()` is its live memory.

    Of what is quantized or sparse that holds aliases: a copy would give them a scale or parts of their own.
    """
    odd = any(one.is_quantized or one.layout is torch.sparse_coo for one in state.values())
    return module.state_dict(keep_vars=True) if odd else state


def _tensors(module: Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _storages(tensor: Tensor) -> Iterable[int]:
    if type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided:
        return (tensor.untyped_storage()._cdata,)  # As nearly all are.
    return _odd_storages(tensor)


def _odd_storages(tensor: Tensor) -> Iterator[int]:
    if is_uninitialized(tensor):
        return
    tensor = local_of(tensor).detach()
    found = None if tensor.is_meta or tensor.is_nested else decompose(tensor, "a state_dict()")
    for part in (tensor,) if found is None else found[2].values():
        yield part.untyped_storage()._cdata


def takes(module: Module, state: Any, saved_of: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether the module's `load_state_dict` makes of it what was saved, of other names and shapes.

    So do observers of quantization, buffers that grow, modules that rename old keys. Found out on a
    copy without memory, so that nothing is changed. What has no memory here has none there, and none after
    a load that does not give it any: torch's copies go nowhere then, or end the process.

    Args:
        state: what its `state_dict()` gives now.
        saved_of: gives tensors of the names, shapes and dtypes that were saved, of whatever values.
    """
    if not any(map(_has_load, module.modules())):
        return False  # Filling is all that torch does here.

    def found_out() -> bool:
        try:
            gone = [name for name, value in state.items() if _is_gone(value)]
            memo: dict[int, Any] = {
                id(tensor): _stand_in(tensor)
                for tensor in _tensors(module)
                if not is_uninitialized(tensor) and tensor.layout is torch.strided
            }
            twin, saved = copy.deepcopy(module, memo), saved_of()
            wanted = _signature(saved)
            twin.load_state_dict(saved)
            made = twin.state_dict()
            return _signature(made) == wanted and not any(made[name].is_meta for name in gone)
        except Exception:
            return False

    return quietly(found_out)


def _stand_in(tensor: Tensor) -> Tensor:
    """Memory for what is small, since a load may look at the values of counters, or make more of it."""
    small = tensor.nbytes <= _STAND_IN_BYTES and not is_distributed(type(tensor))
    small = small and not _is_gone(tensor)
    made = (
        torch.zeros_like(tensor, device="cpu") if small else torch.empty_like(tensor, device="meta")
    )
    return Parameter(made, tensor.requires_grad) if isinstance(tensor, Parameter) else made


def _is_gone(value: Any) -> bool:
    if not isinstance(value, Tensor) or is_distributed(type(value)):
        return False
    wraps = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wraps or value.is_nested or is_uninitialized(value):
        return value.is_meta  # It has no memory of its own that could be asked for.
    return is_gone(value)


def _signature(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (value.dtype, value.shape) if isinstance(value, Tensor) else type(value)
        for name, value in state.items()
    }


def _has_load(module: Module) -> bool:
    return bool(module._load_state_dict_pre_hooks) or any(
        name in vars(module) or getattr(type(module), name) is not getattr(Module, name)
        for name in ("load_state_dict", "_load_from_state_dict")
    )


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


def kept_shape(optimizer: Optimizer, name: str, parameter: Tensor | None) -> _Shape | None:
    """Shape of what one of torch's own optimizers keeps under a name; None: any.

    Other classes may keep moments of any shape, such as those of a projection to a low rank.
    """
    if parameter is None or type(optimizer).step.__module__.partition(".")[0] != "torch":
        return None
    if name in _FLAT and isinstance(optimizer, torch.optim.LBFGS):
        given = optimizer.param_groups[0]["params"]
        flat = not any(map(is_uninitialized, given))
        return (sum(one.numel() * (1 + one.is_complex()) for one in given),) if flat else None
    return _KEPT[name](tuple(parameter.shape)) if name in _KEPT else None
