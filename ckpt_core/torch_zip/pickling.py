"""How a tree is pickled inside `torch.save`."""

from __future__ import annotations

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from ckpt_core.torch_zip.blame import unsavable
from ckpt_core.torch_zip.records import PersistentId, Record, Records

_DENSE = (_rebuild_tensor_v2, _rebuild_tensor_v3)
_STORAGES = (TypedStorage, UntypedStorage)
_NO_STORAGES = frozenset(
    {str, int, float, bool, type(None), tuple, list, dict, type, OrderedDict, Tensor}
)


class Skipping:
    """torch's `skip_data`. Left on by an interrupt, it would empty every later file of `torch.save`."""

    def __init__(self) -> None:
        self._context: Any = None

    def begin(self) -> None:
        """No bytes of storages are written from here."""
        self._context = torch.serialization.skip_data()
        self._context.__enter__()

    def end(self) -> None:
        """As it was before. Idempotent."""
        # Interrupted before it knew how it was, the context has changed nothing.
        with contextlib.suppress(AttributeError):
            if self._context is not None:
                self._context.__exit__(None, None, None)


@dataclass
class Job:
    """What `torch.save` gets in place of the tree.

    Attributes:
        tree: what is to be saved.
        skipping: begun when the tree is pickled; ended by the caller.
        tensors: filled in then: what the bytes of each record are.
    """

    tree: Any
    skipping: Skipping
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Pickler(ABC):
    """Takes the place of `pickle.Pickler` in `torch.save`, which derives a class from it."""

    def __init__(self, file: BytesIO, protocol: int) -> None:
        """As `pickle.Pickler`."""
        self._file = file
        self._protocol = protocol

    @abstractmethod
    def persistent_id(self, obj: Any) -> PersistentId:
        """torch's, in the class that it derives."""

    def dump(self, job: Job) -> None:
        """Pickle the tree of the job.

        Raises:
            ConfigError: something in the tree cannot be pickled; names its place.
        """
        records = Records(self.persistent_id)
        try:
            TreePickler(self._file, self._protocol, records).dump(job.tree)
        except MemoryError:
            raise
        except Exception as exc:  # objects in the tree run their own code
            raise unsavable(job.tree, exc, lambda part: _try(part, self._protocol)) from exc
        job.tensors = records.tensors
        # Order matters: under skip_data some kinds of tensors refuse to be pickled.
        job.skipping.begin()


PICKLE_MODULE = SimpleNamespace(__name__=__name__, Pickler=Pickler)
"""For `torch.save`."""


class TreePickler(pickle.Pickler):
    """`pickle.Pickler` that gives each tensor and storage a record of its own."""

    def __init__(self, file: BytesIO, protocol: int, records: Records) -> None:
        super().__init__(file, protocol)
        self._protocol = protocol
        self._records = records

    def persistent_id(self, obj: Any) -> PersistentId | None:
        """What stands for a storage; None for everything else."""
        kind = type(obj)
        if kind in _NO_STORAGES:  # asked for every object of the tree
            return None
        if kind is Record:
            return self._records.persistent_id(obj)
        return (
            self._records.persistent_id(self._records.whole(obj))
            if isinstance(obj, _STORAGES)
            else None
        )

    def reducer_override(self, obj: Any) -> Any:
        """A tensor's own way to be pickled, with a record where it is a view of a dense storage."""
        kind = type(obj)
        if kind is OrderedDict and not obj and not vars(obj):
            # What it says itself, after a while: every tensor brings one along.
            return OrderedDict, ()
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj.requires_grad and not obj.is_leaf:
            obj = obj.detach()
        if kind is Tensor and (plain := self._records.plain(obj)) is not None:
            return _rebuild_tensor_v2, plain
        reduced = obj.__reduce_ex__(self._protocol)
        if not isinstance(reduced, tuple):
            return reduced
        func, args, *rest = reduced
        if func in _DENSE:
            args = self._records.compacted(args)
        elif func is _rebuild_from_type_v2 and args[0] in _DENSE:
            inner, kind, inner_args, state = args
            args = (inner, kind, self._records.compacted(inner_args), state)
        return (func, args, *rest)


def _try(part: Any, protocol: int) -> None:
    """Pickle a part of the tree for the sake of its errors."""
    nowhere = Records(lambda _: ("storage", UntypedStorage, "0", "", 0))
    TreePickler(BytesIO(), protocol, nowhere).dump(part)
