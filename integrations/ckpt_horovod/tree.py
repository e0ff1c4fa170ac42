"""What a checkpoint of a Horovod job holds, and under which names.

    {"model": the module, "optimizer": the optimizer, "rng": RngState(), ...what was attached or given}

Without an attached module, "model" is a dict of the named parameters; buffers are then nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from torch import Tensor, nn

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
        tree: dict[str, Any] = {"model": self._model(), "optimizer": self._optimizer}
        tree |= self._parts
        tree |= parts
        orphans = self._orphans(tree["model"])
        return tree | ({"parameters": orphans} if orphans else {})

    def layers(self) -> list[Tensor]:
        """The optimizer's parameters, in its order."""
        return list(self._optimizer_params())

    def layer(self, param: Tensor) -> dict[str, Tensor]:
        """A parameter and the state that the optimizer keeps of it, by name.

        Scalars are left out: they are copied at the end of the iteration. So is a parameter that is in no
        tree: it came to the optimizer after it was wrapped, and has no name.
        """
        place = self._places().get(id(param))
        found = {} if place is None else {place: param.detach()}
        return found | {
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
            self._numbers = {id(p): number for number, p in enumerate(self._optimizer_params())}
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

    def _model(self) -> dict[str, Tensor]:
        return {name: param.detach() for param, name in self._names.items()}

    def _places(self) -> dict[int, str]:
        """Where each parameter stands in the tree, by identity."""
        if not self._known_places:
            places = {id(param): f"parameters.{name}" for param, name in self._names.items()}
            self._known_places = places | _names_of(self.of({})["model"], self._names)
        return self._known_places

    def _orphans(self, model: Any) -> dict[str, Tensor]:
        """Parameters of the optimizer that the attached module lacks."""
        held = _names_of(model, self._names)
        return {
            name: param.detach() for param, name in self._names.items() if id(param) not in held
        }


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What lies in dicts, lists and tuples, however deep, under the names of the saved tree.

    A name that no save knows (an object that is saved by its `state_dict`) is waited for as all leaves.
    """
    if not isinstance(value, dict | list | tuple):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _inside(f"{name}.{key}", item)


def _names_of(model: Any, names: Mapping[Tensor, str]) -> dict[int, str]:
    if isinstance(model, nn.Module):
        return {id(param): f"model.{name}" for name, param in model.named_parameters()}
    return {id(param): f"model.{name}" for param, name in names.items()}
