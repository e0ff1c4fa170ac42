"""What a checkpoint of a Horovod job holds, and under which names.

    {"model": the module, "optimizer": the optimizer, "rng": RngState(), ...what was attached or given}

Without an attached model, "model" is a dict of the named parameters; buffers are then nobody's. Parameters
that an attached one lacks are under "parameters".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from numbers import Number
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt_core import ConfigError, RngState

_OWN = ("optimizer", "parameters")
_PLAIN = (bool, int, float, str, NoneType)


class StateTree:
    """Builds the tree of one optimizer, and names its tensors as the saved tree will.

    Args:
        optimizer: the wrapped optimizer.
        names: the name of each of its parameters.
    """

    def __init__(self, optimizer: Any, names: Mapping[Tensor, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._parts: dict[str, Any] = {"rng": RngState()}
        self._known_places: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def attach(self, parts: Mapping[str, Any]) -> None:
        """Add parts for good, or replace them.

        Raises:
            ConfigError: a name is taken by what is always there.
        """
        self._check(parts)
        self._parts.update(parts)
        self._known_places = {}

    def of(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The tree, with these parts for this once.

        Raises:
            ConfigError: a name is taken.
        """
        self._check(parts)
        given = self._parts | dict(parts)
        model = {name: param.detach() for param, name in self._names.items()}
        tree: dict[str, Any] = {"model": model, "optimizer": self._optimizer} | given
        held = self._held(given)
        orphans = {
            name: param.detach() for param, name in self._all_names() if id(param) not in held
        }
        return tree | ({"parameters": orphans} if orphans else {})

    def loose(self) -> dict[str, Tensor]:
        """Parameters that are saved by names of their own, since no attached model holds them."""
        tree = self.of({})
        named = {} if "model" in self._parts else tree["model"]
        return {**named, **tree.get("parameters", {})}

    def fill(self, parts: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
        """Put the plain values of a step into the lists and dicts of these parts and of attached ones."""
        for name, part in (self._parts | dict(parts)).items():
            _filled(part, restored[name])

    def wrapped(self, parts: Mapping[str, Any]) -> list[Any]:
        """The optimizer, and behind it others in the tree that Horovod wraps, each once."""
        self._check(parts)
        given = _objects([self._optimizer, self._parts | dict(parts)])
        found = {id(item): item for item in given if hasattr(item, "_allreduce_delay")}
        return list(found.values())

    def is_shared(self, parts: Mapping[str, Any]) -> bool:
        """Whether another optimizer in the tree changes parameters of this one, too."""
        mine = {id(param) for param in self._optimizer_params()}
        return any(
            id(param) in mine
            for _, item in _inside("", self._parts | dict(parts))
            if isinstance(item, Optimizer) and item is not self._optimizer
            for group in item.param_groups
            for param in group["params"]
        )

    def layers(self) -> list[Tensor]:
        """The optimizer's parameters, in its order; from now on their names are by its groups of now."""
        params = list(self._optimizer_params())
        numbers = {id(param): number for number, param in enumerate(params)}
        if numbers != self._numbers:
            self._numbers, self._known_places = numbers, {}
        return params

    def is_on_device(self) -> bool:
        """Whether some are: in host memory no page is locked, nor need be there before a save."""
        return any(param.device.type != "cpu" for param in self.layers())

    def layer(self, param: Tensor) -> dict[str, Tensor]:
        """A parameter and the state that the optimizer keeps of it, by name.

        Scalars are left out: they are copied at the end of the iteration.
        """
        return {self._places()[id(param)]: param.detach()} | {
            name: value
            for name, value in self._state_of(param)
            if isinstance(value, Tensor) and value.dim() > 0
        }

    def names(self, param: Tensor) -> tuple[str, ...]:
        """Of all leaves that an update of this parameter changes."""
        return tuple(self.layer(param) | dict(self._state_of(param)))

    def _state_of(self, param: Tensor) -> list[tuple[str, Any]]:
        """What the optimizer may change in place of a parameter's state, by name."""
        if id(param) not in self._numbers:  # first of all, or a group was added
            self.layers()
        number = self._numbers[id(param)]
        # .get: the state is a defaultdict, and asking must not make an entry.
        state = self._optimizer.state.get(param, {})
        found = _inside(f"optimizer.state.{number}", state)
        return [(name, value) for name, value in found if not isinstance(value, _PLAIN)]

    def _check(self, parts: Mapping[str, Any]) -> None:
        taken = [name for name in parts if name in _OWN]
        if taken:
            raise ConfigError(
                f"{taken[0]}=: this name is taken by what is always saved; give it another one"
            )

    def _optimizer_params(self) -> Iterator[Tensor]:
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def _all_names(self) -> Iterator[tuple[Tensor, str]]:
        """Parameters and names; one that came after wrapping is named by its place in the groups."""
        yield from self._names.items()
        for number, group in enumerate(self._optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param not in self._names:
                    yield param, f"group.{number}.{place}"

    def _places(self) -> dict[int, str]:
        """Where each parameter stands in the tree, by identity."""
        if not self._known_places:
            places = {id(param): f"parameters.{name}" for param, name in self._all_names()}
            self._known_places = places | self._held(self._parts)
        return self._known_places

    def _held(self, parts: Mapping[str, Any]) -> dict[int, str]:
        """Where parameters stand in "model", by identity; the others are saved as "parameters"."""
        if "model" not in parts:
            return {id(param): f"model.{name}" for param, name in self._names.items()}
        found: dict[int, str] = {}
        for name, item in _inside("model", parts["model"]):
            if isinstance(item, nn.Module):
                found |= {id(param): f"{name}.{key}" for key, param in item.named_parameters()}
            elif isinstance(item, Tensor):
                found[id(item)] = name
        return found


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What lies in dicts, lists and tuples, however deep, under the names of the saved tree.

    A name that no save knows (an object that is saved by its `state_dict`) is waited for as all leaves.
    """
    if not isinstance(value, dict | list | tuple):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _inside(f"{name}.{key}", item)


def _objects(value: Any) -> Iterator[Any]:
    """As `_inside`, without plain values: a list of all losses is looked through at each end."""
    if not isinstance(value, dict | list | tuple):
        yield value
        return
    for item in value.values() if isinstance(value, dict) else value:
        if type(item) not in _PLAIN:
            yield from _objects(item)


def _filled(live: Any, saved: Any) -> Any:
    """What belongs in the place of `live`: a list or dict itself, filled; what loads or is filled itself."""
    if type(live) is type(saved) is list:
        live[:] = [_filled(*both) for both in zip_longest(live[: len(saved)], saved)]
    elif type(live) is type(saved) is dict:
        items = {key: _filled(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(items)
    elif _is_plain(live):
        return saved
    return live


def _is_plain(live: Any) -> bool:
    if isinstance(live, dict):
        return all(map(_is_plain, live.values()))
    if isinstance(live, list | tuple | set | frozenset | deque):
        return all(map(_is_plain, live))
    return isinstance(live, Number | np.generic | str | bytes | NoneType)
