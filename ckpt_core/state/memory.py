"""The memory of tensors, as snapshot/ reads it and restore/ fills it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import attrgetter, lt
from typing import TypeVar

import torch
from torch import Tensor, UntypedStorage

from ckpt_core.errors import BarrierError, ConfigError
from ckpt_core.state.leaf import extent

_Tensors = TypeVar("_Tensors", bound=Sequence[Tensor])

GIL_RELEASE_BYTES = 128 * 1024
"""Copies of at least this size release the GIL: about 20 microseconds of memmove."""

ONE_THREAD_ELEMENTS = 32 * 1024 - 1
"""torch spreads a copy_ of more elements over its intra-op threads, which training needs. Setting the number
of threads instead is no way out: set_num_threads also counts for every thread started later."""

FEW_ELEMENTS = 256
"""A device is asked to collect or spread so many where it has no room for more."""

_GONE = "the memory of a leaf was taken away while it was being staged"

_LOW = 1 << 40
"""An address below may be none: of a tensor that has lost its memory torch says how far in it began."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_COMMON = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    }
)
"""dtypes that all of torch's kernels know, on every device and in every release."""

_READABLE = 0x100  # PyBUF_READ
_WRITABLE = 0x200  # PyBUF_WRITE
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def refuse_fake() -> None:
    """Raise ConfigError under torch's FakeTensorMode: what is made there has no memory to read or fill."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise ConfigError(
            "tensors have no bytes under FakeTensorMode: save and restore outside of it"
        )


def memory_of(tensor: Tensor) -> memoryview:
    """Writable bytes of a contiguous CPU tensor; the caller keeps the tensor alive."""
    view: memoryview = _view_of(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view


def memory_at(address: int, nbytes: int) -> memoryview:
    """Bytes at an address, read-only; the caller keeps the memory alive."""
    view: memoryview = _view_of(address, nbytes, _READABLE)
    return view


def lies_at(tensor: Tensor) -> int:
    """Where a tensor lies now: another process that it is sent to makes torch move it to shared memory.

    Raises:
        BarrierError: as `refuse_freed`.
    """
    address = tensor.data_ptr()
    if address < _LOW:
        refuse_freed([tensor])
    if _is_cut(tensor):
        raise BarrierError(_GONE)
    return address


def refuse_freed(tensors: Sequence[Tensor]) -> None:
    """Before leaves are read that were handed over a while ago.

    Raises:
        BarrierError: one has lost its memory. Which one it is says whoever knows their names.
    """
    if first_freed(tensors, list(map(Tensor.data_ptr, tensors))) is not None:
        raise BarrierError(_GONE)


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor has lost its memory, or some of it: FSDP and others take it away while not in use.

    Danger: torch gives out such a tensor as any other, and whoever reads it ends the process.
    """
    return first_freed([tensor], [tensor.data_ptr()]) is not None or _is_cut(tensor)


def is_gone(tensor: Tensor) -> bool:
    """Whether nothing can be copied into a tensor: it is on the meta device, or freed."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return tensor.is_meta or (plain and is_freed(tensor))


def why_gone(tensor: Tensor) -> str:
    """Why nothing can be copied into a plain live tensor; "" where something can."""
    try:
        return "the memory of the live tensor has been freed" if is_gone(tensor) else ""
    except RuntimeError:  # It has leaked out of a vmap, or out of a grad.
        return "the live tensor has no bytes here"


def first_freed(tensors: Sequence[Tensor], pointers: Sequence[int]) -> int | None:
    """The number of the first tensor that has lost its memory, of those at these addresses."""
    if min(pointers, default=_LOW) >= _LOW:
        return None
    pairs = enumerate(zip(pointers, tensors, strict=True))
    return next((index for index, (at, one) in pairs if at < _LOW and _has_none(one, at)), None)


def first_cut(tensors: Sequence[Tensor], odd: Sequence[int]) -> int | None:
    """The number of the first tensor that ends behind its storage, which has been made shorter since.

    Args:
        odd: of them, those that may not be contiguous.
    """
    ends = list(map(attrgetter("nbytes"), tensors))
    begins = list(map(Tensor.storage_offset, tensors))
    for index in (*odd, *(compress(count(), begins) if any(begins) else ())):
        ends[index] = _end(tensors[index])
    sizes = map(UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
    cut = list(map(lt, sizes, ends))
    return cut.index(True) if True in cut else None


def _is_cut(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < _end(tensor)


def _end(tensor: Tensor) -> int:
    """The byte of its storage behind the last one of a tensor; 0 of an empty one."""
    size = extent(tensor.shape, tensor.stride())
    return (int(tensor.storage_offset()) + size) * tensor.itemsize if size else 0


def _has_none(tensor: Tensor, address: int) -> bool:
    # One without elements has no memory either.
    if not tensor.numel():
        return False
    return address == 0 or not tensor.untyped_storage().nbytes()


def as_words(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers: some dtypes have no copies of their own."""
    return tensor.view(_WORDS[tensor.element_size()])


def as_known(tensor: Tensor) -> Tensor:
    """A tensor as one of a dtype that every kernel copies; itself where its own is such a dtype."""
    return tensor if tensor.dtype in _COMMON else as_words(tensor)


def all_as_known(tensors: _Tensors) -> _Tensors | list[Tensor]:
    """The same of tensors of one dtype, at once: there may be a hundred thousand."""
    known = not tensors or tensors[0].dtype in _COMMON
    return tensors if known else list(map(as_words, tensors))


def one_thread_limit(tensor: Tensor, count: int) -> int:
    """Most elements of one copy_ between `tensor` and host memory; a device has no such limit."""
    return ONE_THREAD_ELEMENTS if tensor.is_cpu else max(count, 1)


def blocks(tensor: Tensor, start: int, count: int, most: int) -> Iterator[tuple[Tensor, int]]:
    """Views of at most `most` elements that are elements start .. start+count in row-major order.

    With each view comes its offset from `start`. No copy of the tensor is made, whatever its strides.
    """
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor
    if flat.dim() == 1:
        for done in range(0, count, most):
            yield flat[start + done : start + min(done + most, count)], done
        return
    row = tensor[0].numel()
    done = 0
    while done < count:
        index, inside = divmod(start + done, row)
        rows = min(count - done, most) // row
        if inside or rows == 0:
            part = min(row - inside, count - done)
            for view, offset in blocks(tensor[index], inside, part, most):
                yield view, done + offset
        else:
            part = rows * row
            yield tensor[index : index + rows], done
        done += part
