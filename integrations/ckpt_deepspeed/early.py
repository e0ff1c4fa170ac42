"""What training may change before the barrier, and what is therefore copied inside `save_checkpoint`.

Parameters and optimizer state change in the optimizer's step alone, and are copied behind training. Buffers
change in the next forward pass, and what the user passes as `client_state` whenever he likes.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage


class Early:
    """Knows tensors by their memory, since DeepSpeed saves detached ones in containers of its own.

    Args:
        tree: whatever holds those that must be copied at once; looked into as pickle does, so also into
            objects that hold tensors.
    """

    def __init__(self, tree: Any = ()) -> None:
        finder = _Finder()
        # What cannot be pickled is told, with its place, when it is saved.
        with contextlib.suppress(Exception):
            finder.dump(tree)
        self._places = finder.places

    def __call__(self, tensor: Tensor) -> bool:
        """Whether it is one of them."""
        return (tensor.device, tensor.data_ptr()) in self._places


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Finder(pickle.Pickler):
    """Notes where dense tensors and storages are; tensors of other kinds are taken apart into such."""

    def __init__(self) -> None:
        super().__init__(_Nowhere())
        self.places: set[tuple[torch.device, int]] = set()

    def persistent_id(self, obj: Any) -> str | None:
        dense = isinstance(obj, Tensor) and obj.layout == torch.strided
        if not (dense or isinstance(obj, TypedStorage | UntypedStorage)):
            return None
        try:
            place = (obj.device, obj.data_ptr())
        except RuntimeError:  # a subclass without memory of its own
            return None
        if place[1]:
            self.places.add(place)
        return "noted"
