"""Whether a step on all parameters is the same as steps on some of them, one after the other.

Three layers: the identity of torch's own `step` functions; a probe on tiny parameters, whole against parts,
bit for bit; and a check after every part of a real step (`SubSteps`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_horovod.substeps import SubSteps, unhooked

_log = logging.getLogger("ckpt_horovod")

_NAMES = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop"),
    *("Rprop", "ASGD", "Adafactor", "SparseAdam", "Muon"),
)
_STEPS = 3
_SHAPES = ((3, 2), (5,), (2, 2), (1,))


def is_separable(optimizer: Any) -> bool:
    """Whether `optimizer`, as the user made it, may be stepped in parts. Draws no random numbers."""
    if _is_torchs_own(type(optimizer)):
        return True
    try:
        return _probe(optimizer)
    except Exception as exc:
        _log.debug("the probe of %s failed: %s", type(optimizer).__name__, exc)
        return False


def _is_torchs_own(cls: type[Any]) -> bool:
    """By identity: a subclass that overrides `step`, or how groups are read, is another optimizer."""
    for name in _NAMES:
        own = getattr(torch.optim, name, None)
        if own is not None and all(
            getattr(cls, method, None) is getattr(own, method, None)
            for method in ("step", "_init_group")
        ):
            return True
    return False


def _probe(optimizer: Any) -> bool:
    """Some steps of tiny clones: whole, and in parts and backwards, must give the same bits."""
    with _generators_kept():
        whole, parts = _clone(optimizer), _clone(optimizer)
        base = type(optimizer)
        for number in range(_STEPS):
            _give_gradients(whole, number)
            _give_gradients(parts, number)
            torch.manual_seed(number)
            unhooked(base.step)(whole)
            drawn = torch.get_rng_state()
            torch.manual_seed(number)
            step = SubSteps(parts, base)
            for param in reversed(_params(parts)):
                step.update([param])
            if not torch.equal(drawn, torch.get_rng_state()):
                return False
        return _same(_contents(whole), _contents(parts))


def _clone(optimizer: Any) -> Any:
    """An optimizer of the same class and settings over tiny parameters, without state."""
    base: Any = type(optimizer)
    clone = base.__new__(base)
    kept = {
        key: value
        for key, value in optimizer.__dict__.items()
        # A scheduler puts a bound method there, which would take the whole optimizer along.
        if key not in ("state", "param_groups") and not isinstance(value, MethodType)
    }
    if _holds_tensors(kept):
        raise TypeError("it holds tensors outside its state")
    clone.__dict__.update(copy.deepcopy(kept))
    clone.state = type(optimizer.state)(dict)
    clone.param_groups = [
        {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": _tiny()}
        for group in optimizer.param_groups
    ]
    return clone


def _tiny() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]


def _give_gradients(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for param in _params(optimizer):
        param.grad = torch.randn(param.shape, generator=generator)


def _params(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _contents(optimizer: Any) -> list[Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    params = _params(optimizer)
    return [[param.detach() for param in params], [optimizer.state[p] for p in params], groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return True
    if isinstance(tree, dict):
        return any(map(_holds_tensors, tree.values()))
    return isinstance(tree, list | tuple | set) and any(map(_holds_tensors, tree))


@contextmanager
def _generators_kept() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield
