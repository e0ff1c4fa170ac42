"""The one door to devices: copies, clones, streams, events and page-locked memory.

    training's stream --event, behind all that is read--> copy stream of that device --event--> writer

Generic over `torch.get_device_module`: what is not in host memory is on a device, and each device has streams
and events of its own. Nothing here waits for a device but what says so. A test gives another one, whose
copies come late; see docs/adr/0015-device-door.md.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ckpt_core.system.device_generators import generators_of, put_generators_back
from ckpt_core.system.page_locks import (
    kept,
    locked_by_torch,
    register,
    runtime_of,
    unregister,
    unregister_and_unmap,
)
from ckpt_core.system.pages import page_memory
from ckpt_core.system.queued import NOTHING_QUEUED as NOTHING_QUEUED
from ckpt_core.system.queued import Event
from ckpt_core.system.queued import Queued as Queued
from ckpt_core.system.queued import Stream as Stream

_log = logging.getLogger("ckpt_core")


class Devices:
    """Everything that the engine asks of devices. Without tensors on one, no device is touched."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn_once(self, text: str, *values: object) -> None:
        """Log a warning, unless the same text has been: of what will be so again and again."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *values)

    def kind(self) -> str | None:
        """The type of this process's devices; None where torch was built for none. Touches no device."""
        try:
            found = torch.accelerator.current_accelerator()
        except (AttributeError, RuntimeError):  # torch before 2.6; 2.6, where there is none
            return None
        return None if found is None else found.type

    def in_use(self) -> bool:
        """Whether this process uses devices at all; if not, no tensor can be on one.

        A backend that cannot tell counts as used.
        """
        kind = self.kind()
        if kind is None:
            return False
        initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
        return True if initialized is None else bool(initialized())

    def of(self, tensor: Tensor) -> torch.device | None:
        """The device with streams that a tensor is on; None: in host memory.

        Also None for backends without streams and events: what is asked of those is done at once.
        """
        if tensor.is_cpu:
            return None
        device = tensor.device
        return device if _has_streams(device.type) else None

    def of_all(self, tensors: Iterable[Tensor]) -> list[torch.device]:
        """The devices of some tensors, each once; quick where none is in use."""
        if not self.in_use():
            return []
        found = dict.fromkeys(map(attrgetter("device"), tensors))
        return [device for device in found if _has_streams(device.type)]

    def any_of(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of some tensors is on a device; looks no further than the first that is."""
        return self.in_use() and any(map(self.of, tensors))

    def of_each(self, tensors: Sequence[Tensor]) -> list[torch.device | None]:
        """The same for each of some tensors; quick for very many."""
        found = list(map(attrgetter("device"), tensors))
        streamed = {device: device if _has_streams(device.type) else None for device in set(found)}
        if len(streamed) == 1:
            return [*streamed.values()] * len(found)
        return list(map(streamed.__getitem__, found))

    def is_flat(self, tensor: Tensor) -> bool:
        """Whether the row-major bytes of a tensor are one run of host memory.

        Asked of tensors without conjugate and negative bits.
        """
        return tensor.is_cpu and tensor.is_contiguous()

    def current(self, kind: str) -> torch.device | None:
        """The current device of a type; None where this machine has none of it."""
        module: Any = getattr(torch, kind, None)
        if not hasattr(module, "current_device") or not module.is_available():
            return None
        return torch.device(kind, module.current_device())

    def and_current(self, devices: Iterable[torch.device]) -> list[torch.device]:
        """Some devices, and the one that this thread computes on, if this process uses any."""
        kind = self.kind() if self.in_use() else None
        current = self.current(kind) if kind is not None and _has_streams(kind) else None
        return list(dict.fromkeys([*devices, *([] if current is None else [current])]))

    # -- streams and events ----------------------------------------------------------------------

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that waits for nothing but events."""
        made: Stream = torch.get_device_module(device).Stream(device=device)
        return made

    def use(self, stream: Stream) -> None:
        """What this thread asks of the stream's device from now on goes to that stream.

        For threads of the engine: the device becomes the current one too. There is no way back, since
        going back to the device of a fresh thread would open a context on device 0.
        """
        torch.get_device_module(stream.device).set_stream(stream)

    def make_current(self, device: torch.device) -> None:
        """What this thread asks of devices without naming one goes to `device`; no way back, as for `use`."""
        set_device = getattr(torch.get_device_module(device), "set_device", None)
        if set_device is not None:  # of a type without it there is one device
            set_device(device)

    def record(self, device: torch.device, stream: Stream | None = None) -> Event:
        """An event behind what is queued on the stream of `device` that is current on this thread.

        Args:
            stream: that one, where it is known: to ask for it takes longer than the rest.
        """
        module = torch.get_device_module(device)
        try:
            # An event that spins while it is waited for takes a core from training.
            event = module.Event(blocking=True)
        except TypeError:
            event = module.Event()
        event.record(stream or module.current_stream(device))
        made: Event = event
        return made

    def queued(self, devices: Iterable[torch.device]) -> Queued:
        """What is queued on the streams of these devices that are current on this thread."""
        events = {device: self.record(device) for device in devices}
        return Queued(events) if events else NOTHING_QUEUED

    def hold_back(self, behind: Queued) -> None:
        """Work that this thread asks of devices from now on runs behind what was queued; blocks no thread.

        It is the streams that wait which are current on this thread, one for each device.
        """
        for device, event in behind.events.items():
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def is_capturing(self) -> bool:
        """Whether what this thread asks of its device now is recorded as a graph, and not done."""
        if not self.in_use():
            return False
        asked = getattr(torch.get_device_module(), "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    # -- bytes -----------------------------------------------------------------------------------

    def flat(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory of a device, 1-D uint8, of the stream that is current on this thread; see `clone`.

        Raises:
            RuntimeError: the device has no room for it (torch.OutOfMemoryError on most).
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def collect(self, tensors: Sequence[Tensor]) -> Tensor:
        """Queue copies of tensors of one device and dtype into memory of their device, back to back.

        On the stream that is current on this thread, which records no gradients, and whose memory it is. A
        few kernels for all of them, and one call: Python takes longer for an operation than a device for a
        small copy.

        Args:
            tensors: contiguous.

        Returns:
            1-D uint8.

        Raises:
            RuntimeError: the device has no room for it.
        """
        flat: Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return flat.view(torch.uint8)

    def copy_all(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Queue copies of tensors into others of the same shapes and device, as `collect` does."""
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy in memory of its own, made by the stream that is current on this thread.

        Its memory belongs to that stream: whoever reads it in another one keeps it until that is done.
        """
        return tensor.clone()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy to host memory on the stream of the source's device that is current on this thread.

        Neither memory may be given back, nor the target read, before an event behind the copy.
        """
        target.copy_(source, non_blocking=self.of(source) is not None)

    def to_host(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor as the current stream of this thread sees them; waits for it."""
        return tensor.detach().cpu()

    # -- onto a device ---------------------------------------------------------------------------

    def buffer(self, nbytes: int, device: torch.device) -> memoryview:
        """Page-locked, page-aligned host memory to fill devices from; unlocked with the last reference.

        Raises:
            RuntimeError: the system refuses to lock so much.
        """
        runtime = runtime_of(device)
        if runtime is None:
            return locked_by_torch(nbytes)
        mapping = page_memory(nbytes)
        memory = (ctypes.c_char * nbytes).from_buffer(mapping)
        address = ctypes.addressof(memory)
        module = torch.get_device_module(device)
        before = module.current_device()
        # Order matters: Ctrl-C may come while it is locked, which takes long, and is seen behind that.
        unlock = weakref.finalize(memory, unregister_and_unmap, runtime, address, device)
        unlock.atexit = False
        kept[address] = mapping
        try:
            # Not to open a context on another device, which may be the current one.
            with module.device(device):
                code = register(runtime, address, nbytes, device)
        finally:
            # Ctrl-C between the calls of the `with` would leave training on this device.
            if module.current_device() != before:
                module.set_device(before)
        if code != 0:
            raise RuntimeError(f"error {code}")
        return memoryview(memory).cast("B")

    def send(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy from host memory to a device, on the stream of it that is current on this thread.

        The source, contiguous, may not be changed or given back, nor the target used elsewhere, before
        an event behind the copy. Of memory that is not page-locked it is copied at once.
        """
        target.copy_(source, non_blocking=True)

    # -- memory ----------------------------------------------------------------------------------

    def pin(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Page-lock host memory, so that the copy engine of a device can write to it.

        Takes 0.2 s for each GB. Called on a thread whose current device is `device`. False where the system
        refuses, and where a backend has no call for it, which is logged once: copies to other memory are
        slower, and wait for each other.
        """
        code = self.ask_to_lock(address, nbytes, device)
        if code is None:
            self.warn_once(
                "torch has no call to page-lock memory for this type of device (torch.%s.cudart): copies "
                "from it to staging memory are slower",
                device.type,
            )
        elif code != 0:
            self.warn_once(
                "%d bytes of staging memory could not be page-locked (error %d): copies from %s are slower. "
                "Lower staging_bytes, or raise the limit of locked memory (ulimit -l)",
                nbytes,
                code,
                device,
            )
        return code == 0

    def ask_to_lock(self, address: int, nbytes: int, device: torch.device) -> int | None:
        """For `pin`: 0 for done, else the number of the error; None where the backend has no call for it."""
        runtime = runtime_of(device)
        return None if runtime is None else register(runtime, address, nbytes, device)

    def unpin(self, address: int, device: torch.device) -> None:
        """Undo `pin`; no copy may be queued to that memory. Idempotent."""
        runtime = runtime_of(device)
        assert runtime is not None
        unregister(runtime, address, device)

    def free_bytes(self, device: torch.device | None = None) -> int:
        """Free memory of a device, or of the current one; 0 where the backend does not say."""
        module = torch.get_device_module(device)
        asked = getattr(module, "mem_get_info", None)
        if asked is None:
            self.warn_once(
                "torch does not say how much memory of this type of device is free (mem_get_info is missing "
                "in %s): no room is taken for clones there, and mode 'device' is as 'host'",
                getattr(module, "__name__", module),
            )
            return 0
        return int(asked(device)[0])

    def has_room(self, nbytes: int, device: torch.device | None = None) -> bool:
        """Whether clones of so much may go there: a fifth of what is free stays for training's own peaks."""
        return nbytes * 5 <= self.free_bytes(device) * 4

    # -- random numbers --------------------------------------------------------------------------

    def generators(self) -> dict[str, list[Tensor]]:
        """Their states, by type of device, and which of them is the current device's.

        Where none is in use those that wait to be put back; nothing where there are none, or the backend
        cannot be asked.
        """
        kind = self.kind()
        return {} if kind is None else generators_of(kind, in_use=self.in_use())

    def set_generators(self, states: Mapping[str, Sequence[Tensor]]) -> tuple[int, int] | None:
        """Put those of the type that this process has back, one state for each device, in order.

        Where the process sees another number of devices, their order tells nothing: the current device, which
        a rank computes on, gets the state of the one that was so then. Devices that are not in use yet get
        theirs when they are, unless the program seeds all of them first.

        Returns:
            That number as it was saved, and as it is; None: they are equal.
        """
        kind = self.kind()
        if kind is None or kind not in states:
            return None
        return put_generators_back(kind, states, in_use=self.in_use())

    # -- for people ------------------------------------------------------------------------------

    def inventory(self) -> list[tuple[str, int]]:
        """Name and bytes of each device of the machine, 0 where the backend does not say; for people."""
        kind = self.kind()
        module = None if kind is None else torch.get_device_module(kind)
        if module is None or not module.is_available():
            return []
        asked = getattr(module, "get_device_properties", None)
        if asked is None:
            return [(str(kind), 0)] * int(module.device_count())
        found = [asked(index) for index in range(module.device_count())]
        return [(each.name, getattr(each, "total_memory", 0)) for each in found]

    def name(self) -> str:
        """What the current device is."""
        module = torch.get_device_module(None)
        asked = getattr(module, "get_device_name", None)
        return str(torch.accelerator.current_accelerator() if asked is None else asked())


@functools.cache
def _has_streams(kind: str) -> bool:
    if kind == "cpu":
        return False
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return False
    return all(hasattr(module, name) for name in ("Stream", "Event", "set_stream"))
