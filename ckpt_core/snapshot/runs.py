"""Leaves of a device that follow each other in the file: few copies take them to the host.

A copy engine takes some microseconds for each copy, and Python ten.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, attrgetter, eq
from typing import Any

import torch
from torch import Tensor

from ckpt_core.errors import StagingError
from ckpt_core.snapshot.copying import copy_range
from ckpt_core.snapshot.items import Items, StageItem
from ckpt_core.snapshot.streams import CopyStreams
from ckpt_core.state import all_as_known, as_known, refuse_freed
from ckpt_core.system.devices import Devices

_log = logging.getLogger("ckpt_core")

_SMALL_BYTES = 2 * 2**20
"""A larger leaf keeps a copy engine busy by itself."""

_RUN_BYTES = 32 * 2**20
"""Memory of the device that leaves are collected in at a time."""

_NO_BOUND = 1 << 62


@dataclass(slots=True)
class Run:
    """Leaves of one device that follow each other in the file, at `offset`, or one leaf of any kind."""

    device: Any
    offset: int
    end: int
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.end - self.offset


def runs_of(
    items: Items,
    on: Sequence[Any],
    *,
    one_dtype: bool = False,
    small_bytes: int = _NO_BOUND,
    most_bytes: int = _NO_BOUND,
) -> Iterator[Run]:
    """Split leaves; those of the host, strided ones and those without bytes are alone.

    Args:
        items: in file order.
        on: the device of each, as `Devices.of_each` tells it.
        small_bytes: larger ones are alone, too.
        most_bytes: of a run of several.
    """
    kinds = list(map(attrgetter("dtype"), items.tensors))
    flat = list(map(Tensor.is_contiguous, items.tensors))
    if _is_one(items, on, flat, small_bytes) and not (one_dtype and len(set(kinds)) > 1):
        yield from _cut(items, on[0], most_bytes)
        return
    run, dtype, room = Run(None, 0, 0), None, 0
    for (tensor, offset, nbytes), device, kind, is_flat in zip(items, on, kinds, flat, strict=True):
        alone = device is None or not 0 < nbytes <= small_bytes or not is_flat
        if (
            alone
            or run.end != offset
            or run.device != device
            or (one_dtype and dtype != kind)
            or nbytes > room
        ):
            if run.tensors:
                yield run
            run, dtype, room = Run(device, offset, offset), kind, most_bytes
        run.tensors.append(tensor)
        run.end = offset + nbytes
        room = 0 if alone else room - nbytes
    if run.tensors:
        yield run


def _is_one(items: Items, on: Sequence[Any], flat: Sequence[bool], small_bytes: int) -> bool:
    """Whether leaves are one run but for its length, as most are; asked without a line for each."""
    offsets, sizes = items.offsets, items.sizes
    return (
        len(set(on)) == 1
        and on[0] is not None
        and all(flat)
        and min(sizes) > 0
        and max(sizes) <= small_bytes
        and all(map(eq, map(add, offsets, sizes), offsets[1:]))
    )


def _cut(items: Items, device: Any, most_bytes: int) -> Iterator[Run]:
    offsets, start = items.offsets, 0
    end = offsets[-1] + items.sizes[-1]
    while start < len(items):
        # The last one that begins within the bound may end behind it.
        stop = bisect_right(offsets, offsets[start] + most_bytes, lo=start)
        if stop == len(items) and end - offsets[start] <= most_bytes:
            stop += 1
        stop = max(stop - 1, start + 1)
        until = offsets[stop] if stop < len(items) else end
        yield Run(device, offsets[start], until, list(items.tensors[start:stop]))
        start = stop


class EagerCopies:
    """Copies of leaves that may change once `save` returns. Made for each save; used on the training thread.

    They are queued on the streams that are current on it. Once a device has no room for them, those that
    follow are made in host memory, and waited for.

    Args:
        timeout_s: longest time that they are waited for.

    Attributes:
        fetched: whether a device had no room.
    """

    def __init__(self, devices: Devices, *, timeout_s: float) -> None:
        self.devices = devices
        self.fetched = False
        self._deadline = time.monotonic() + timeout_s

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of one leaf.

        Raises:
            StagingError: the host has no room for it either, or the device has failed.
        """
        return self.of_run([tensor], self.devices.of(tensor))[0]

    def of_run(self, tensors: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
        """The bytes of leaves as `runs_of` finds them, of one dtype: in one piece, or in one for each.

        Raises:
            StagingError: as for `of`.
        """
        if device is not None and not self.fetched:
            try:
                if len(tensors) == 1:
                    return [self._clone(tensors[0])]
                return [self.devices.collect(all_as_known(tensors))]
            except RuntimeError as exc:
                self.fetched = True
                self.devices.warn_once(
                    "no room on %s for copies of what may change once a save returns (%s): they are made in "
                    "host memory, and the call waits for them; such a save is staged as in mode 'host'",
                    device,
                    exc,
                )
        return [self._on_host(tensor, device) for tensor in tensors]

    def _clone(self, tensor: Tensor) -> Tensor:
        known = as_known(tensor)
        made = self.devices.clone(known)
        return made if known is tensor else made.view(tensor.dtype)

    def _on_host(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        try:
            if device is None:
                return self._clone(tensor)
            # Order matters: a copy to memory that is not page-locked waits itself, for ever if need be.
            self.devices.queued([device]).wait(deadline=self._deadline)
            found = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
            copy_range(tensor.detach(), 0, found, devices=self.devices)
            self.devices.queued([device]).wait()
        except (RuntimeError, MemoryError) as exc:
            raise StagingError(
                f"what may change once the save returns could not be copied, neither on its device nor to "
                f"the host: {exc}. Nothing of this step was saved; committed steps and training are untouched"
            ) from exc
        return found.view(tensor.dtype).view(tensor.shape)


def frozen(items: Sequence[StageItem], copies: EagerCopies) -> list[StageItem]:
    """Copy leaves as `copies` does.

    Args:
        items: in file order.

    Returns:
        The same bytes in few items, in file order.

    Raises:
        StagingError: there is no room for them.
    """
    found: list[StageItem] = []
    columns = Items.of(items)
    # No gradients are recorded, and not for `no_grad`: see `homes`.
    plain = Items(list(map(Tensor.detach, columns.tensors)), columns.offsets, columns.sizes)
    for run in runs_of(plain, copies.devices.of_each(plain.tensors), one_dtype=True):
        at = run.offset
        for made in copies.of_run(run.tensors, run.device):
            found.append((made, at, made.nbytes))
            at += made.nbytes
    return found


def collected(items: Sequence[StageItem], streams: CopyStreams) -> Iterable[StageItem]:
    """The same bytes in few items, in file order, for copies to the host.

    Small leaves of a device that follow each other are copies that are queued when they are asked for, in
    memory of the copy stream; all others are what they were.

    Args:
        items: in file order.
    """
    if not streams.devices.in_use():
        return items
    columns = Items.of(items)
    on = streams.devices.of_each(columns.tensors)
    return _collected(columns, on, streams) if any(on) else items


def _collected(items: Items, on: Sequence[Any], streams: CopyStreams) -> Iterator[StageItem]:
    for run in runs_of(items, on, one_dtype=True, small_bytes=_SMALL_BYTES, most_bytes=_RUN_BYTES):
        if len(run.tensors) == 1:
            yield run.tensors[0], run.offset, run.nbytes
            continue
        refuse_freed(run.tensors)
        streams.enter(run.device)
        try:
            flat = streams.devices.collect(all_as_known(run.tensors))
        except RuntimeError as exc:
            # Slower, for each run again: no warning.
            _log.info("leaves are copied one by one, since they cannot be collected: %s", exc)
            ends = accumulate([tensor.nbytes for tensor in run.tensors], initial=run.offset)
            for tensor, at in zip(run.tensors, ends, strict=False):
                yield tensor, at, tensor.nbytes
        else:
            yield flat, run.offset, run.nbytes
