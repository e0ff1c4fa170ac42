"""A few bytes of leaves, looked at when they are handed over and again when they have been copied.

An update of a dense tensor changes nearly all of its bytes, so one cache line of it tells. What changes few
elements (rows of an embedding, an update without locks in another process) is found by chance at most, and
what lies on a device is not looked at: reading it would make training wait for the device.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import torch

from ckpt_core.snapshot.items import StageItem
from ckpt_core.state import is_freed
from ckpt_core.system.devices import Devices

MOST = 64
"""Leaves that one call looks at; of more, those that are next in turn, spread over all of them."""

LINE_BYTES = 64
Look = tuple[int, tuple[int, bytes]]
"""The offset of a leaf in its shard file; a place in its memory, and what was there."""

_line_at = (ctypes.c_char * LINE_BYTES).from_address


class Sampler:
    """Chooses where to look: another place in each save. One owner, one thread.

    Args:
        devices: say what is not in host memory.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        # A generator of its own: those of the program are part of its state.
        self._random = random.Random()
        # By the count of leaves and where the first one is: of one save, each file has turns of its own.
        self._turns: dict[tuple[int, int], int] = {}

    def take(self, items: Sequence[StageItem]) -> list[Look]:
        """Where some of the leaves are looked at, and the bytes there now."""
        total, draw = len(items), self._random.getrandbits(40)
        chosen = items if total <= MOST else [items[place] for place in self._places(items)]
        if self._devices.in_use():
            # What is neither in host memory nor on a device with streams has no address here, either.
            of = self._devices.of
            chosen = [item for item in chosen if item[0].is_cpu and of(item[0]) is None]
        found: list[Look] = []
        for tensor, offset, nbytes in chosen:
            address = tensor.data_ptr()
            if address and nbytes >= LINE_BYTES and tensor.is_contiguous():
                place = draw % (nbytes - LINE_BYTES + 1)
                found.append((offset, (place, _line_at(address + place).raw)))
            elif address and nbytes:
                place, size = _run_of(tensor, draw)
                found.append((offset, (place, look(tensor, place, size))))
        return found

    def _places(self, items: Sequence[StageItem]) -> list[int]:
        """The stager copies in their order: what is torn is the tail of them."""
        total = len(items)
        apart, key = -(-total // MOST), (total, items[0][0].data_ptr())
        if len(self._turns) > MOST:
            self._turns.clear()
        # Leaves that lie elsewhere each time are looked at by chance.
        turn = self._turns.get(key, self._random.randrange(apart)) % apart
        self._turns[key] = turn + 1
        places = [*range(turn, total, apart), *range((turn + 1) % apart, total, apart)]
        return places[:MOST]


def look(tensor: torch.Tensor, place: int, size: int) -> bytes:
    """The bytes at a place in a leaf's memory, now; none where the leaf has lost its memory."""
    return b"" if is_freed(tensor) else ctypes.string_at(tensor.data_ptr() + place, size)


def _run_of(tensor: torch.Tensor, draw: int) -> tuple[int, int]:
    """A place in a strided leaf, and how many bytes from there are its own: at most a line."""
    strides, shape = tensor.stride(), tensor.shape
    steps = sorted(zip(strides, shape, strict=True), key=lambda step: (step[0] != 1, -step[1]))
    run = steps.pop(0)[1] if steps and steps[0][0] == 1 else 1
    element = sum(stride * (draw % length) for stride, length in steps)
    item = tensor.element_size()
    size = min(LINE_BYTES, run * item)
    return element * item + draw % (run * item - size + 1), size
