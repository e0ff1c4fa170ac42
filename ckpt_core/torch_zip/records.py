"""The storages of a file: one for each distinct view, none of them with memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch.serialization import location_tag

from ckpt_core.errors import ConfigError

PersistentId = tuple[str, Any, str, str, int]
"""What torch pickles in place of a storage: "storage", type, key, location, elements."""


@dataclass(frozen=True, slots=True)
class Record:
    """A storage of the file.

    Attributes:
        stand_in: of its type and length, on the meta device: it has no memory.
        tensor: the live bytes, in row-major order of this tensor.
        stride: of the tensors that use it.
    """

    stand_in: TypedStorage | UntypedStorage
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
            tensor, stride = _packed(view)
            record = self._add(key, storage, tensor, stride)
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
        return self._known.get(key) or self._add(key, storage, tensor, (1,))

    def persistent_id(self, record: Record) -> PersistentId:
        """What is pickled in place of the record; a new tuple each time."""
        kind, storage_type, key, _, numel = self._torch_id(record.stand_in)
        self.tensors[f"data/{key}"] = record.tensor
        return kind, storage_type, key, location_tag(record.tensor.untyped_storage()), numel

    def _add(
        self,
        key: Hashable,
        storage: TypedStorage | UntypedStorage,
        tensor: Tensor,
        stride: tuple[int, ...],
    ) -> Record:
        record = Record(_stand_in(storage, tensor.nbytes), tensor, stride)
        if tensor.nbytes:  # without bytes there is no address that could tell views apart
            self._known[key] = record
        return record


def _stand_in(storage: TypedStorage | UntypedStorage, nbytes: int) -> TypedStorage | UntypedStorage:
    """A storage of the same type and another length, without memory."""
    empty: UntypedStorage = UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
    if isinstance(storage, UntypedStorage):
        return empty
    return TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=empty, dtype=storage.dtype, _internal=True
    )


def _untyped(storage: TypedStorage | UntypedStorage) -> UntypedStorage:
    return storage._untyped_storage if isinstance(storage, TypedStorage) else storage


def _view(
    storage: UntypedStorage,
    dtype: torch.dtype,
    place: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> Tensor:
    """An alias of live memory: a plain tensor without gradient and conjugate bit, whatever it was."""
    offset, size, stride = place
    if 0 not in size:
        last = offset + sum([(count - 1) * step for count, step in zip(size, stride, strict=True)])
        # Danger: set_ would make the live storage longer.
        if (last + 1) * dtype.itemsize > storage.nbytes():
            raise ConfigError(
                f"a {dtype} tensor of shape {size} lies in a storage of {storage.nbytes()} bytes, too "
                "few for it: its memory was freed; gather the tensor before it is saved"
            )
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


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
