"""The clones of mode DEVICE: side by side as in the file, in memory of their devices that is kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ckpt_core.snapshot.items import Items, StageItem
from ckpt_core.snapshot.runs import Run, runs_of
from ckpt_core.snapshot.streams import CopyStreams
from ckpt_core.state import all_as_known, refuse_freed
from ckpt_core.system.devices import Devices
from ckpt_core.units import align_up

_APART_BYTES = 64
"""Runs begin at multiples of this, plus what their place in the file has: words stay where words may be."""


class _Places:
    """Where the leaves of one state go in memory of their devices.

    Args:
        leaves: in file order.
        on: the device of each.
        memory: of each device.

    Attributes:
        items: the same bytes, run by run.
    """

    def __init__(
        self,
        leaves: Items,
        on: Sequence[torch.device | None],
        runs: Sequence[Run],
        memory: dict[torch.device, Tensor],
    ) -> None:
        self._offsets, self._on = leaves.offsets, on
        self._alike_in = _alike_in(leaves)
        self._of: list[Tensor] = []
        self._alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        self.items: list[StageItem] = []
        at = dict.fromkeys(memory, 0)
        for run in runs:
            begin = _begin(at[run.device], run)
            end = at[run.device] = begin + run.end - run.offset
            self.items.append((memory[run.device][begin:end], run.offset, end - begin))
            for tensor in run.tensors:
                place = memory[run.device][begin : begin + tensor.nbytes]
                self._alike.setdefault((run.device, tensor.dtype), []).append(len(self._of))
                self._of.append(place.view(tensor.dtype).view(tensor.shape))
                begin += tensor.nbytes

    def fit(self, leaves: Items, on: Sequence[torch.device | None]) -> bool:
        """Whether these are leaves of the same offsets, shapes, dtypes and devices."""
        if on != self._on:
            return False
        # The same object is that of an arrangement, which is one of shapes and dtypes.
        return leaves.offsets is self._offsets or (
            list(leaves.offsets) == list(self._offsets) and _alike_in(leaves) == self._alike_in
        )

    def fill(self, leaves: Items, devices: Devices) -> None:
        """Queue the copies of leaves that fit."""
        for numbers in self._alike.values():
            places = list(map(self._of.__getitem__, numbers))
            sources = list(map(leaves.tensors.__getitem__, numbers))
            devices.copy_all(all_as_known(places), all_as_known(sources))


def _alike_in(leaves: Items) -> tuple[list[Any], ...]:
    """On whole lists, since a state may have a hundred thousand leaves."""
    return tuple([list(map(attrgetter(name), leaves.tensors)) for name in ("shape", "dtype")])


def _begin(used: int, run: Run) -> int:
    return align_up(used, _APART_BYTES) + run.offset % _APART_BYTES


def _side_by_side(files: Sequence[Sequence[StageItem]]) -> tuple[Items, list[int]]:
    """The leaves of several files as those of one, in which no run goes from one to the next.

    Returns:
        The leaves, and where each file begins.
    """
    leaves, begins = files[0], [0]
    for items in files[1:]:
        _, offset, nbytes = leaves[-1] if leaves else (None, 0, 0)
        begin = align_up(offset + nbytes + 1, _APART_BYTES)
        begins.append(begin)
        leaves = [*leaves, *((tensor, begin + at, size) for tensor, at, size in items)]
    return Items.of(leaves), begins


def _taken_apart(items: Sequence[StageItem], begins: list[int]) -> list[Sequence[StageItem]]:
    """What has been cloned, file by file."""
    if len(begins) == 1:
        return [items]
    found: list[list[StageItem]] = [[] for _ in begins]
    for tensor, offset, nbytes in items:
        file = bisect_right(begins, offset) - 1
        found[file].append((tensor, offset - begins[file], nbytes))
    return [*found]


class DeviceClones:
    """The clones of DEVICE mode, in memory that is kept from save to save. Used by the stager alone.

    Its next use is queued behind the copies out of it, on the same stream.

    Source: LightCheck-G, whose snapshots are staged in GPU memory.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._memory: dict[torch.device, Tensor] = {}
        self._places: _Places | None = None

    def make(self, files: Sequence[Sequence[StageItem]]) -> list[Sequence[StageItem]] | None:
        """Queue clones on the copy streams; None where there is no room, or leaves are on the host.

        Returns:
            The same bytes of each file in few items, in file order.

        Raises:
            BarrierError: a leaf has lost its memory.
        """
        leaves, begins = _side_by_side(files)
        refuse_freed(leaves.tensors)
        on = self._streams.devices.of_each(leaves.tensors)
        if self._places is None or not self._places.fit(leaves, on):
            # Its memory may be that of the next one.
            self._places = None
            runs = list(runs_of(leaves, on))
            if not self._have_memory(runs):
                return None
            self._places = _Places(leaves, on, runs, self._memory)
        for device in self._memory:
            self._streams.enter(device)
        self._places.fill(leaves, self._streams.devices)
        return _taken_apart(self._places.items, begins)

    def drop(self) -> None:
        """Let go of the memory: it is as large as the state, and training may have a use for it."""
        self._places = None
        self._memory.clear()

    def _have_memory(self, runs: Sequence[Run]) -> bool:
        need: dict[torch.device, int] = {}
        for run in runs:
            if run.device is None:
                return False
            need[run.device] = _begin(need.get(run.device, 0), run) + run.end - run.offset
        for device in self._memory.keys() - need.keys():
            del self._memory[device]
        return all(self._has(nbytes, device) for device, nbytes in need.items())

    def _has(self, nbytes: int, device: torch.device) -> bool:
        kept = self._memory.pop(device, None)
        if kept is None or not nbytes <= kept.numel() <= 2 * nbytes:
            # Before more is asked for.
            del kept
            if not self._streams.devices.has_room(nbytes, device):
                return False
            kept = self._streams.flat(nbytes, device)
        if kept is not None:
            self._memory[device] = kept
        return kept is not None
