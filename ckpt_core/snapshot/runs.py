"""Leaves of a device that follow each other in the file: few copies take them to the host.

A copy engine takes some microseconds for each copy, and Python ten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from ckpt_core.snapshot.stager import StageItem
from ckpt_core.snapshot.streams import CopyStreams
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
    items: Sequence[StageItem],
    devices: Devices,
    *,
    one_dtype: bool = False,
    small_bytes: int = _NO_BOUND,
    most_bytes: int = _NO_BOUND,
) -> Iterator[Run]:
    """Split leaves; those of the host, strided ones and those without bytes are alone.

    Args:
        items: in file order.
        small_bytes: larger ones are alone, too.
        most_bytes: of a run of several.
    """
    tensors = [tensor for tensor, _, _ in items]
    columns = (devices.of_each(tensors), map(attrgetter("dtype"), tensors))
    contiguous = map(Tensor.is_contiguous, tensors)
    run, dtype, room = Run(None, 0, 0), None, 0
    for (tensor, offset, nbytes), device, kind, is_contiguous in zip(
        items, *columns, contiguous, strict=True
    ):
        alone = device is None or not 0 < nbytes <= small_bytes or not is_contiguous
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


def frozen(items: Sequence[StageItem], devices: Devices) -> list[StageItem]:
    """Queue copies of leaves on the streams that are current on this thread; those of the host are made.

    Args:
        items: in file order.

    Returns:
        The same bytes in few items, in file order.
    """
    found: list[StageItem] = []
    # No gradients are recorded, and not for `no_grad`: see `homes`.
    plain = [(tensor.detach(), offset, nbytes) for tensor, offset, nbytes in items]
    for run in runs_of(plain, devices, one_dtype=True):
        if len(run.tensors) == 1:
            found.append((devices.clone(run.tensors[0]), run.offset, run.nbytes))
        else:
            found.append((devices.collect(run.tensors), run.offset, run.nbytes))
    return found


def collected(items: Sequence[StageItem], streams: CopyStreams) -> Iterator[StageItem]:
    """The same bytes in few items, in file order, for copies to the host.

    Small leaves of a device that follow each other are copies that are queued when they are asked for, in
    memory of the copy stream; all others are what they were.

    Args:
        items: in file order.
    """
    devices = streams.devices
    if not devices.of_all([tensor for tensor, _, _ in items]):
        yield from items
        return
    for run in runs_of(
        items, devices, one_dtype=True, small_bytes=_SMALL_BYTES, most_bytes=_RUN_BYTES
    ):
        if len(run.tensors) > 1:
            streams.enter(run.device)
            try:
                flat = devices.collect(run.tensors)
            except RuntimeError as exc:
                # Slower, for each run again: no warning.
                _log.info("leaves are copied one by one, since they cannot be collected: %s", exc)
            else:
                yield flat, run.offset, run.nbytes
                continue
        at = run.offset
        for tensor in run.tensors:
            nbytes = run.nbytes if len(run.tensors) == 1 else tensor.nbytes
            yield tensor, at, nbytes
            at += nbytes
