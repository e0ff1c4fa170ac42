"""Loading an object to the bit: torch's optimizers change what `load_state_dict` gives them.

`Optimizer.load_state_dict` casts every tensor of a parameter's state to the dtype of the parameter
(fp32 moments of bf16 parameters, counters, masks), turns dicts of any kind into plain ones and texts
into that of a generator, fails for arrays and named tuples, and puts copies in the place of tensors in
`param_groups`.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_core.state.distributed import local_of
from ckpt_core.state.quiet import quietly
from ckpt_core.system.interrupts import putting_back


def load_exactly(live: Any, saved_of: Callable[[], Any], *, partial: bool = False) -> None:
    """Call `live.load_state_dict`, and put back what torch's optimizers made of the saved values.

    Whatever hooks, or a class of its own, make of them on purpose stays. The device is that of the parameter.

    Args:
        saved_of: gives the saved state, in new containers each time, since a load may change them.
        partial: it has only some of a module's entries.
    """
    groups = [dict(group) for group in live.param_groups] if isinstance(live, Optimizer) else []
    # What this tells of is put back below.
    casting = "Casting complex values to real"
    how = {"strict": False} if partial and _takes_strict(live.load_state_dict) else {}

    def load() -> None:
        state = _loadable(live, saved_of())
        # What may be strict is given its own for what is not wanted, which stays as it is.
        if partial and not how and isinstance(state, dict):
            for name, value in live.state_dict().items():
                state.setdefault(name, value)
        quietly(lambda: live.load_state_dict(state, **how), casting)

    given = _heard(live, load)
    if isinstance(live, Optimizer):
        _keep_states(live, given[-1] if given else saved_of())
        _keep_tensors(groups, live.param_groups)
        return
    inner = list(_optimizer_states(saved := saved_of(), ()))
    after = live.state_dict() if inner and not isinstance(live, torch.nn.Module) else None
    known = _dtypes_of(live)
    for path in inner if after is not None else ():
        # The rows of an optimizer's own state_dict() are the live ones.
        rows = _at(after, path)
        _keep_rows(rows, _at(saved, path), known.get(id(rows)))


def _takes_strict(load: Callable[..., Any]) -> bool:
    try:
        inspect.signature(load).bind({}, strict=False)
    except TypeError:
        return False
    return True


def _heard(live: Any, load: Callable[[], None]) -> list[Any]:
    """Load; what torch's optimizer was given: its hooks and its class may give rows to other parameters."""
    given: list[Any] = []
    hooks, last = getattr(live, "_optimizer_load_state_dict_pre_hooks", {}), object()

    def heard() -> None:
        hooks[last] = lambda _, state: given.append(state)
        load()

    putting_back(heard, lambda: hooks.pop(last, None))
    return given


def _dtypes_of(wrapper: Any) -> dict[int, torch.dtype | None]:
    """Of parameters, by the identity of their rows, of the optimizers that an object has as attributes."""
    values = getattr(wrapper, "__dict__", {}).values()
    rows = [one.state.items() for one in values if isinstance(one, Optimizer)]
    return {id(row): getattr(owner, "dtype", None) for owner, row in chain(*rows)}


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A value that torch would rebuild from a generator, and cannot: it passes this one on as it is."""

    value: Any


def _loadable(live: Any, saved: Any) -> Any:
    """The state of an optimizer in a form that torch's own `load_state_dict` takes."""
    own = getattr(type(live), "load_state_dict", None)
    if own is not Optimizer.load_state_dict or not _is_optimizer_state(saved):
        return saved
    # What belongs to no parameter is taken as it is.
    keys = {key for group in saved["param_groups"] for key in group["params"]}
    rows = {key: _wrapped(row) if key in keys else row for key, row in saved["state"].items()}
    return {**saved, "state": rows}


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _wrapped(item) for key, item in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)(map(_wrapped, value))
    if isinstance(value, Tensor | str | bytes | bytearray | set | frozenset):
        return value
    return _Wrapped(value) if isinstance(value, Iterable) else value


def _keep_states(live: Optimizer, saved: Any) -> None:
    if not _is_optimizer_state(saved):
        return
    for old, new in zip(saved["param_groups"], live.param_groups, strict=False):
        for key, parameter in zip(old["params"], new["params"], strict=False):
            rows, was = live.state.get(parameter), saved["state"].get(key)
            if isinstance(rows, dict):
                _keep_rows(rows, was, parameter.dtype)
            elif rows is not None:
                live.state[parameter] = _kept(rows, was, parameter.dtype)


def _keep_rows(rows: Any, saved: Any, dtype: torch.dtype | None = None) -> None:
    if isinstance(rows, dict) and isinstance(saved, dict):
        for name in rows.keys() & saved.keys():
            rows[name] = _kept(rows[name], saved[name], None if name == "step" else dtype)


def _kept(now: Any, saved: Any, dtype: torch.dtype | None) -> Any:
    """What was saved, if all that happened to it is what torch does.

    Args:
        dtype: to which torch has cast tensors; None: unknown.
    """
    if isinstance(now, _Wrapped):
        return now.value
    if isinstance(saved, Tensor):
        if type(now) is not type(saved) or now.dtype is saved.dtype or now.shape != saved.shape:
            return now
        exact = saved.to(now.device)
        return exact if dtype in (None, now.dtype) and _is_cast(now, exact) else now
    if isinstance(saved, dict) and isinstance(now, dict):
        for key, value in saved.items():
            saved[key] = _kept(now.get(key, value), value, dtype)
        return saved
    if type(saved) in (list, tuple, deque) and type(now) is type(saved) and len(now) == len(saved):
        kept = (_kept(*pair, dtype) for pair in zip(now, saved, strict=True))
        return deque(kept, saved.maxlen) if isinstance(saved, deque) else type(saved)(kept)
    torn = isinstance(saved, str) and str(now).startswith("<generator object")
    return saved if torn else now


def _is_cast(now: Tensor, saved: Tensor) -> bool:
    """Whether a tensor has the values of the saved one as torch casts them: no hook has changed them."""
    now, saved = local_of(now), local_of(saved)
    if saved.is_quantized or now.is_meta:
        return now.is_meta
    made = (saved.real if saved.is_complex() else saved).to(now.dtype)
    if made.layout is not torch.strided:
        made, now = made.to_dense(), now.to_dense()
    # NaN is no other value than NaN here.
    return bool(((made == now) | ((made != made) & (now != now))).all())


def _keep_tensors(before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Learning rates and the like that are tensors stay where a captured graph reads them."""
    owned = [value for group in before for value in group.values() if isinstance(value, Tensor)]
    shared = {id(value) for value in owned if sum(value is other for other in owned) > 1}
    for old, new in zip(before, groups, strict=False):
        for name, value in old.items():
            now = new.get(name)
            if not isinstance(value, Tensor) or not isinstance(now, Tensor) or id(value) in shared:
                continue
            if (value.dtype, value.shape) == (now.dtype, now.shape):
                value.detach().copy_(now.detach())
                new[name] = value


def _is_optimizer_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def _optimizer_states(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Paths of the states of optimizers that an object wraps."""
    if not isinstance(value, dict):
        return
    if _is_optimizer_state(value):
        yield from ((*path, "state", key) for key in value["state"])
        return
    for key, item in value.items():
        yield from _optimizer_states(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
