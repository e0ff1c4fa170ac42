"""File bytes into tensors: the sink of a restore.

A contiguous CPU tensor is filled through its address, without torch: ten thousand small leaves cost one
scatter read for every thousand. A tensor that is strided is filled from the reader's buffer, block by block
along its outer dimensions, so that no whole copy of it ever exists; to one on a device copies are queued.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt_core.restore.sending import Batch, Piece, Sender
from ckpt_core.restore.slots import Copies
from ckpt_core.restore.units import HOT_BYTES, READ_BYTES
from ckpt_core.state import GIL_RELEASE_BYTES, as_words, blocks, memory_of, one_thread_limit
from ckpt_core.system.devices import Devices
from ckpt_core.system.pages import address_of
from ckpt_core.system.streaming import large_move

_move_large = large_move()


class Run(NamedTuple):
    """File bytes that a tensor takes: from `offset` in the file to its row-major bytes from `start` on."""

    offset: int
    tensor: Tensor
    start: int
    nbytes: int


class TensorSink:
    """Fills tensors with the bytes of one file. Keeps them alive; used by several readers at once."""

    def __init__(self, runs: Sequence[Run], sender: Sender | None = None) -> None:
        """
        Args:
            runs: what goes where; no two of them share bytes of the file or of a tensor. Empty ones
                may be among them. Starts and lengths are multiples of the tensor's item size.
            sender: for those that are on devices, shared by the sinks of a restore.
        """
        self._sender = sender or Sender(Devices())
        full = sorted([run for run in runs if run.nbytes], key=lambda run: run.offset)
        self._tensors = [run.tensor.detach() for run in full]
        self._homes = [self._sender.devices.of(tensor) for tensor in self._tensors]
        self._starts = [run.offset for run in full]
        self._ends = [run.offset + run.nbytes for run in full]
        self._bases = [run.start for run in full]
        self._memory = [
            _part(tensor, run) if home is None and is_flat(tensor) else None
            for tensor, home, run in zip(self._tensors, self._homes, full, strict=True)
        ]
        self._flat = [
            None if home is None else flat_bytes(tensor)
            for tensor, home in zip(self._tensors, self._homes, strict=True)
        ]
        # Every strided copy has a fixed cost: fewer, larger ones.
        self.block_bytes = HOT_BYTES if None not in self._memory else READ_BYTES
        self.queues = any(home is not None for home in self._homes)

    def window(self, start: int, stop: int, spare: memoryview) -> list[memoryview] | None:
        """Memory for file bytes start..stop; None when one that is strided or on a device is among it."""
        views: list[memoryview] = []
        position = start
        for index in self._between(start, stop):
            memory = self._memory[index]
            if memory is None:
                return None
            begin, end = max(start, self._starts[index]), min(stop, self._ends[index])
            if begin > position:
                views.append(spare[position - start : begin - start])
            offset = self._starts[index]
            whole = begin == offset and end == self._ends[index]
            views.append(memory if whole else memory[begin - offset : end - offset])
            position = end
        if position < stop:
            views.append(spare[position - start : stop - start])
        return views

    def deliver(self, start: int, data: memoryview) -> Copies | None:
        """Copy file bytes from `start` on to where they belong, or queue that."""
        if not self.queues:
            self._deliver(start, data, None)
            return None
        batch = Batch(self._sender, data)
        try:
            self._deliver(start, data, batch)
            return batch.queue()
        except BaseException:
            # The reader is not told of what is queued already, and its buffer may go.
            batch.settle()
            raise

    def _deliver(self, start: int, data: memoryview, batch: Batch | None) -> None:
        for index in self._between(start, start + len(data)):
            begin = max(start, self._starts[index])
            end = min(start + len(data), self._ends[index])
            memory, home = self._memory[index], self._homes[index]
            offset = begin - self._starts[index]
            if memory is not None:
                _move(memory[offset : offset + end - begin], data[begin - start : end - start])
            elif home is None or batch is None:
                self._fill(index, offset, data[begin - start : end - start])
            else:
                self._add(batch, index, (offset, end - begin), begin - start)

    def _add(self, batch: Batch, index: int, part: tuple[int, int], at: int) -> None:
        """Queue bytes `(offset, nbytes)` of a run on a device, which are in the buffer from `at` on."""
        home, flat = self._homes[index], self._flat[index]
        assert home is not None
        start, nbytes = self._bases[index] + part[0], part[1]
        if flat is None:
            batch.add_views(home, byte_range(self._tensors[index], start, nbytes), at)
        else:
            batch.add_flat(home, Piece(flat, start, nbytes, at))

    def _fill(self, index: int, offset: int, data: memoryview) -> None:
        """Write row-major bytes of a run of any strides in host memory, from its byte `offset` on.

        `offset` and the length are multiples of the item size. `data` may be used again on return.
        """
        source = torch.frombuffer(data, dtype=torch.uint8)
        start = self._bases[index] + offset
        for target, at in byte_range(self._tensors[index], start, len(data)):
            part = source[at : at + target.nbytes]
            target.copy_(part.view(target.dtype).view(target.shape))

    def _between(self, start: int, stop: int) -> Iterator[int]:
        """Runs that have bytes in start..stop, in file order."""
        index = bisect_right(self._ends, start)
        while index < len(self._starts) and self._starts[index] < stop:
            yield index
            index += 1


def is_flat(tensor: Tensor) -> bool:
    """Whether the row-major bytes of `tensor` are one run of host memory."""
    plain = not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and plain


def byte_range(tensor: Tensor, start: int, nbytes: int) -> Iterator[tuple[Tensor, int]]:
    """Views that are row-major bytes start .. start+nbytes of a tensor, each with its byte from `start` on.

    Their dtype has the tensor's item size; `copy_` to and from them moves bits unchanged.
    """
    plain = not tensor.is_conj() and not tensor.is_neg()
    words = as_words(tensor) if plain else tensor
    item = tensor.element_size()
    most = one_thread_limit(tensor, nbytes // item)
    for view, offset in blocks(words, start // item, nbytes // item, most):
        yield view, offset * item


def flat_bytes(tensor: Tensor) -> Tensor | None:
    """A tensor as the bytes of one run of its device's memory; None: it is none."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.view(-1).view(torch.uint8)


def _part(tensor: Tensor, run: Run) -> memoryview:
    memory = memory_of(tensor)
    whole = run.nbytes == len(memory)
    return memory if whole else memory[run.start : run.start + run.nbytes]


def _move(target: memoryview, source: memoryview) -> None:
    if len(source) < GIL_RELEASE_BYTES:
        target[:] = source
        return
    # Past the caches: what is read here lies in them, and nobody looks at what is written before all is.
    _move_large(address_of(target), address_of(source), len(source))
