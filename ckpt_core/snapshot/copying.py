"""Byte copies from a live leaf into staging memory: the innermost loop of a snapshot.

Contiguous CPU leaves are moved on raw addresses, large ones past the caches: no tensor views are built, so
ten thousand small leaves cost milliseconds. Small copies keep the GIL (giving it up and fighting for it again
costs more than the copy, and may cost a whole switch interval); large ones release it, so that training goes
on.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from ckpt_core.state import (
    FEW_ELEMENTS,
    GIL_RELEASE_BYTES,
    as_known,
    blocks,
    lies_at,
    one_thread_limit,
)
from ckpt_core.system.devices import Devices
from ckpt_core.system.pages import address_of
from ckpt_core.system.streaming import large_move, memmove, memmove_locked

Buffer = ctypes.Array[ctypes.c_char]
_move_large = large_move()


def move(target: int, source: int, nbytes: int) -> None:
    """Copy between two memories that do not overlap; the caller keeps both alive."""
    (_move_large if nbytes >= GIL_RELEASE_BYTES else memmove_locked)(target, source, nbytes)


def move_all(targets: Iterable[int], sources: Iterable[int], sizes: Sequence[int]) -> None:
    """The same between many addresses; no line of Python for each."""
    # Not past the caches: some of them may be smaller than a line.
    step = memmove if max(sizes, default=0) >= GIL_RELEASE_BYTES else memmove_locked
    deque(map(step, targets, sources, sizes), maxlen=0)


def buffers_at(pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Buffer]:
    """Memory at these addresses, for `write_all`; empty where `move_all` is better, as some of it is large.

    Danger: they keep nothing alive.
    """
    if max(sizes, default=0) >= GIL_RELEASE_BYTES:
        return ()
    kinds = {size: (ctypes.c_char * size).from_address for size in set(sizes)}
    return [kinds[size](pointer) for pointer, size in zip(pointers, sizes, strict=True)]


def write_all(memory: memoryview, inside: int, buffers: Iterable[Buffer]) -> None:
    """Copy buffers one behind the other into a part of a mapping; takes half as long as `move_all`."""
    mapping = memory.obj
    assert isinstance(mapping, mmap.mmap)
    mapping.seek(address_of(memory) - address_of(mapping) + inside)
    deque(map(mapping.write, buffers), maxlen=0)


def zero(target: int, nbytes: int) -> None:
    """Zero `nbytes` at an address."""
    ctypes.memset(target, 0, nbytes)


def copy_range(tensor: torch.Tensor, start: int, target: torch.Tensor, *, devices: Devices) -> None:
    """Copy row-major bytes `start .. start+len(target)` of a leaf into a run of staging memory.

    Called for leaves that are strided or on a device; a contiguous leaf on a device is one copy that is
    queued on the current stream. `start` and the length are multiples of the item size. Never makes a whole
    copy of the leaf: a strided one is walked in blocks along its outer dimensions.

    Args:
        tensor: the live leaf.
        start: byte offset into the row-major bytes.
        target: 1-D uint8 tensor on the host.

    Raises:
        BarrierError: the leaf has lost its memory, or some of it.
    """
    lies_at(tensor)
    tensor = as_known(tensor)
    begin, words = start // tensor.element_size(), target.view(tensor.dtype)
    count = words.numel()
    most = one_thread_limit(tensor, count)
    if count <= most and tensor.is_contiguous():
        # Each call of torch gives the interpreter's lock away: for one block there are none to spare.
        devices.copy(words, tensor.view(-1)[begin : begin + count])
        return
    _copy_blocks(tensor, begin, words, devices, most=most)


def _copy_blocks(
    tensor: torch.Tensor, begin: int, words: torch.Tensor, devices: Devices, *, most: int
) -> None:
    try:
        for view, offset in blocks(tensor, begin, words.numel(), most):
            devices.copy(words[offset : offset + view.numel()].view(view.shape), view)
    except RuntimeError:
        # A device collects what is strided in memory of its own first, and may have no room for it.
        if devices.of(tensor) is None or tensor.is_contiguous() or most <= FEW_ELEMENTS:
            raise
        _copy_blocks(tensor, begin, words, devices, most=most // 64)
