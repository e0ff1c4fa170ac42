"""The storages of a file: one for each distinct view, none of them with memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch._utils import _rebuild_tensor_v2
from torch.serialization import location_tag

from ckpt_core.errors import ConfigError

PersistentId = tuple[str, Any, str, str, int]
"""What torch pickles in place of a storage: "storage", type, key, location, elements."""


class Record(NamedTuple):
    """A storage of the file.

    Attributes:
        stand_in: of its length, on the meta device: it has no memory.
        dtype: of its type; None: it has none.
        tensor: the live bytes, in row-major order of this tensor.
        stride: of the tensors that use it.
    """

    stand_in: UntypedStorage
    dtype: torch.dtype | None
    tensor: Tensor
    stride: tuple[int, ...]


class Records:
    """Makes the storages of one file while its tree is pickled. Holds on to the live tensors.

    Attributes:
        tensors: what the bytes of each record are, by its name; complete when the tree is pickled.
    """

    def __init__(self, torch_id: Callable[[object], PersistentId]) -> None:
        """Start a file.

        Args:
            torch_id: torch's own `persistent_id`; it numbers stand-ins in the order in which it meets
                them, and has them written as records.
        """
        self.tensors: dict[str, Tensor] = {}
        self._torch_id = torch_id
        self._known: dict[Hashable, Record] = {}
        self._locations: dict[torch.device, str] = {}

    def plain(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """What `compacted` gives of a tensor like any other on the host, in less time.

        None for a tensor that may have ways of its own to be pickled: torch shall say.

        Raises:
            ConfigError: the memory of the tensor was freed.
        """
        if (
            not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.__dict__
            or tensor._backward_hooks
            or not _is_usual(tensor.dtype)
        ):
            return None
        size, stride, dtype = tuple(tensor.size()), tensor.stride(), tensor.dtype
        key = (tensor.data_ptr(), size, stride, dtype, tensor.device)
        record = self._known.get(key)
        if record is None:
            _check(tensor.untyped_storage(), dtype, (int(tensor.storage_offset()), size, stride))
            record = self._add(key, dtype, *_packed(tensor.detach()))
        return record, 0, size, (*record.stride,), tensor.requires_grad, OrderedDict()

    def compacted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a dense tensor's rebuild function, with a record for a storage.

        The record has the bytes of the view alone, and lies in memory as a clone of the view would:
        dense layouts such as channels_last stay, gaps and repetitions go.

        Raises:
            ConfigError: the memory of the tensor was freed.
        """
        storage, offset, size, stride, *rest = args
        # Dtypes that are younger than typed storages bring theirs along, behind the hooks.
        dtype = storage.dtype if isinstance(storage, TypedStorage) else rest[2]
        view = _view(_untyped(storage), dtype, (offset, size, stride))
        key = (view.data_ptr(), size, stride, dtype, view.device)
        record = self._known.get(key)
        if record is None:
            typed = isinstance(storage, TypedStorage)
            record = self._add(key, dtype if typed else None, *_packed(view))
        # New objects, as in torch: pickle refers back to old ones, and the file would differ from torch's.
        return (record, 0, size, (*record.stride,), *rest)

    def whole(self, storage: TypedStorage | UntypedStorage) -> Record:
        """The record of a storage that is in the tree as such, or under a tensor that is not dense.

        Raises:
            ConfigError: it has no memory.
        """
        untyped = _untyped(storage)
        if untyped.device.type == "meta":
            raise ConfigError("a storage on the meta device has no bytes that could be saved")
        tensor = torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
        dtype = storage.dtype if isinstance(storage, TypedStorage) else None
        key = (tensor.data_ptr(), tensor.nbytes, dtype, tensor.device)
        return self._known.get(key) or self._add(key, dtype, tensor, (1,))

    def persistent_id(self, record: Record) -> PersistentId:
        """What is pickled in place of the record; a new tuple each time."""
        word, kind, key, _, numel = self._torch_id(record.stand_in)
        tensor, dtype = record.tensor, record.dtype
        self.tensors[f"data/{key}"] = tensor
        if dtype is not None:
            kind, numel = _storage_type(dtype), numel // dtype.itemsize
        location = self._locations.get(tensor.device)
        if location is None:
            location = self._locations[tensor.device] = location_tag(tensor.untyped_storage())
        return word, kind, key, location, numel

    def _add(
        self, key: Hashable, dtype: torch.dtype | None, tensor: Tensor, stride: tuple[int, ...]
    ) -> Record:
        empty: UntypedStorage = UntypedStorage(tensor.nbytes, device="meta")  # type: ignore[no-untyped-call]
        record = Record(empty, dtype, tensor, stride)
        if tensor.nbytes:  # without bytes there is no address that could tell views apart
            self._known[key] = record
        return record


@cache
def _is_usual(dtype: torch.dtype) -> bool:
    """Whether torch pickles a dense tensor of the dtype as it did before it had any others."""
    func, args = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]
    return func is _rebuild_tensor_v2 and len(args) == 6


@cache
def _storage_type(dtype: torch.dtype) -> Any:
    """The class that torch names as the type of a storage."""
    empty: UntypedStorage = UntypedStorage(0)  # type: ignore[no-untyped-call]
    typed: Any = TypedStorage(wrap_storage=empty, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
    return getattr(torch, typed._pickle_storage_type())


def _untyped(storage: TypedStorage | UntypedStorage) -> UntypedStorage:
    return storage._untyped_storage if isinstance(storage, TypedStorage) else storage


def _view(
    storage: UntypedStorage,
    dtype: torch.dtype,
    place: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> Tensor:
    """An alias of live memory: a plain tensor without gradient and conjugate bit, whatever it was."""
    _check(storage, dtype, place)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


def _check(
    storage: UntypedStorage,
    dtype: torch.dtype,
    place: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> None:
    """ConfigError if memory is not all there."""
    offset, size, stride = place
    if 0 not in size:
        last = offset + sum([(count - 1) * step for count, step in zip(size, stride, strict=True)])
        # Danger: set_ would make the live storage longer.
        if (last + 1) * dtype.itemsize > storage.nbytes():
            raise ConfigError(
                f"a {dtype} tensor of shape {size} lies in a storage of {storage.nbytes()} bytes, too "
                "few for it: its memory was freed; gather the tensor before it is saved"
            )


def _packed(view: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The view so that its row-major bytes are those of a clone, and the strides of the clone."""
    if view.is_contiguous():
        return _flat(view), view.stride()
    stride = torch.empty_like(view, device="meta").stride()
    outer_first = sorted(range(view.dim()), key=stride.__getitem__, reverse=True)
    moved = view.permute(outer_first)
    return (_flat(moved) if moved.is_contiguous() else moved), stride


def _flat(tensor: Tensor) -> Tensor:
    # Not view(-1): where all sizes are 1 it keeps whatever stride there was.
    return tensor.as_strided((tensor.numel(),), (1,))
