"""Copies of leaves on their devices, side by side as in the file: few copies take them to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_core.snapshot.stager import StageItem
from ckpt_core.snapshot.streams import CopyStreams
from ckpt_core.system.devices import Devices
from ckpt_core.units import align_up

_APART_BYTES = 64
"""Runs begin at multiples of this, plus what their place in the file has: words stay where words may be."""


@dataclass(slots=True)
class _Run:
    """Leaves of one device that follow each other in the file, and where they go in its memory."""

    device: torch.device
    at: int
    offset: int
    end: int


def cloned(
    items: Sequence[StageItem],
    memory: Callable[[int, torch.device], Tensor | None],
    devices: Devices,
) -> list[StageItem] | None:
    """Queue copies of leaves on the streams that are current on this thread; leaves on the host are cloned.

    Args:
        items: in file order.
        memory: gives a device's, once for each device.

    Returns:
        The same bytes in as few items as can be, in file order; None where `memory` gave none.
    """
    found: list[_Run | StageItem] = []
    parts: dict[torch.device, list[tuple[int, Tensor]]] = {}
    used: Counter[torch.device] = Counter()
    run: _Run | None = None
    for tensor, offset, nbytes in items:
        device = devices.of(tensor)
        if device is None or nbytes == 0:
            run = None
            found.append((devices.clone(tensor), offset, nbytes))
            continue
        if run is None or run.device != device or run.end != offset:
            at = align_up(used[device], _APART_BYTES) + offset % _APART_BYTES
            run = _Run(device, at, offset, offset)
            found.append(run)
        parts.setdefault(device, []).append((run.at + offset - run.offset, tensor))
        run.end = offset + nbytes
        used[device] = run.at + run.end - run.offset
    flat = {device: memory(nbytes, device) for device, nbytes in used.items()}
    if None in flat.values():
        return None
    whole = {device: target for device, target in flat.items() if target is not None}
    for device, target in whole.items():
        devices.gather(target, parts[device])
    return [_item(each, whole) if isinstance(each, _Run) else each for each in found]


def _item(run: _Run, flat: dict[torch.device, Tensor]) -> StageItem:
    nbytes = run.end - run.offset
    return flat[run.device][run.at : run.at + nbytes], run.offset, nbytes


class DeviceClones:
    """The clones of DEVICE mode, in memory that is kept from save to save. Used by the stager alone.

    Its next use is queued behind the copies out of it, on the same stream.

    Source: LightCheck-G, whose snapshots are staged in GPU memory.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._flat: dict[torch.device, Tensor] = {}

    def make(self, items: Sequence[StageItem]) -> list[StageItem] | None:
        """Queue clones on the copy streams; None where there is no room, or leaves are on the host."""
        devices = self._streams.devices
        if any(devices.of(tensor) is None for tensor, _, _ in items):
            return None
        return cloned(items, self._memory, devices)

    def _memory(self, nbytes: int, device: torch.device) -> Tensor | None:
        kept = self._flat.get(device)
        if kept is not None and nbytes <= kept.numel() <= 2 * nbytes:
            self._streams.enter(device)
            return kept
        self._flat.pop(device, None)
        del kept
        if not self._streams.devices.has_room(nbytes, device):
            return None
        made = self._streams.flat(nbytes, device)
        if made is not None:
            self._flat[device] = made
        return made
