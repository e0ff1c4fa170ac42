"""The memory of tensors, as snapshot/ reads it and restore/ fills it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor

GIL_RELEASE_BYTES = 128 * 1024
"""Copies of at least this size release the GIL: about 20 microseconds of memmove."""

ONE_THREAD_ELEMENTS = 32 * 1024 - 1
"""torch spreads a copy_ of more elements over its intra-op threads, which training needs. Setting the number
of threads instead is no way out: set_num_threads also counts for every thread started later."""

_READABLE = 0x100  # PyBUF_READ
_WRITABLE = 0x200  # PyBUF_WRITE
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def memory_of(tensor: Tensor) -> memoryview:
    """Writable bytes of a contiguous CPU tensor; the caller keeps the tensor alive."""
    view: memoryview = _view_of(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view


def memory_at(address: int, nbytes: int) -> memoryview:
    """Bytes at an address, read-only; the caller keeps the memory alive."""
    view: memoryview = _view_of(address, nbytes, _READABLE)
    return view


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
