"""What training may change before the barrier, and what is therefore copied inside `save_checkpoint`.

Parameters that the optimizer holds, and its state, change in its step alone, and are copied behind training.
Buffers, frozen parameters (a momentum encoder) and what `get_extra_state` gives change in the next forward
pass, and what the user passes as `client_state` whenever he likes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage


class Early:
    """Knows tensors by their memory, since DeepSpeed saves detached ones in containers of its own.

    Args:
        tree: whatever holds those that must be copied at once; looked into as pickle does, so also into
            objects that hold tensors.
        but: those that change in the optimizer's step alone.

    Attributes:
        nbytes: of all that were found; infinite where something could not be looked into.
    """

    def __init__(self, tree: Any = (), *, but: Iterable[Tensor] = ()) -> None:
        finder = _Finder()
        whole = True
        try:
            finder.dump(tree)
        except Exception:  # what cannot be pickled is told, with its place, when it is saved
            whole = False
        for tensor in but:
            finder.places.pop((tensor.device, tensor.data_ptr()), None)
        self._places = finder.places
        self.nbytes = sum(finder.places.values()) if whole else float("inf")

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
        self.places: dict[tuple[torch.device, int], int] = {}

    def persistent_id(self, obj: Any) -> str | None:
        dense = isinstance(obj, Tensor) and obj.layout == torch.strided
        if not (dense or isinstance(obj, TypedStorage | UntypedStorage)):
            return None
        try:
            place = (obj.device, obj.data_ptr())
        except RuntimeError:  # a subclass without memory of its own
            return None
        if place[1]:
            nbytes = obj.nbytes if isinstance(obj, Tensor) else obj.nbytes()
            self.places[place] = max(self.places.get(place, 0), nbytes)
        elif dense and obj.numel() and not obj.is_meta:  # so is a DTensor, which gives 0
            return None
        return "noted"
