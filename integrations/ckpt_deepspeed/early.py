"""Copies of what training may change before the barrier.

Parameters and optimizer state change in the optimizer's step alone, and are copied behind training. Buffers
change in the next forward pass, and what the user passes as `client_state` whenever he likes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Early:
    """Knows tensors by their memory.

    Args:
        tensors: those that must be copied at once.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._places = {_place(tensor) for tensor in tensors if tensor.numel()}

    def settle(self, tree: Any) -> Any:
        """The tree with clones in their place; containers on the way are new ones, all else is the same."""
        if isinstance(tree, Tensor):
            return tree.detach().clone() if _place(tree) in self._places else tree
        if not self._places or type(tree) not in (dict, OrderedDict, list, tuple):
            return tree
        if isinstance(tree, dict):
            return self._mapping(tree)
        return type(tree)([self.settle(item) for item in tree])

    def _mapping(self, tree: dict[Any, Any]) -> Any:
        changed = {key: self.settle(value) for key, value in tree.items()}
        if all(changed[key] is value for key, value in tree.items()):
            return tree
        copied = copy.copy(tree)  # with the attributes that a state_dict has, such as _metadata
        copied.update(changed)
        return copied


def tensors_of(tree: Any) -> Iterable[Tensor]:
    """The tensors in nested containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple | set):
        for value in tree:
            yield from tensors_of(value)


def _place(tensor: Tensor) -> tuple[Any, int]:
    return (tensor.device, tensor.data_ptr())
