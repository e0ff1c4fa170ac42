"""The device of a run, and what its link does without an engine. Imported only by processes that measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ckpt_core.errors import ConfigError
from ckpt_core.system.devices import Devices

HOST = "cpu"
_SPIN_CYCLES = 20_000_000
_RING_BYTES = 2**30
"""Of page-locked memory, which raw copies go through again and again: to lock more takes long."""


def resolve(name: str | None) -> torch.device:
    """The device of that name, or the current one of this machine.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if name is None:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if kind is None:
            raise ConfigError("no device is here: name one by --device, such as cpu for a trial")
        return torch.device(kind.type, torch.accelerator.current_device_index())
    try:
        device = torch.empty(1, device=name).device
        torch.get_device_module(device)
    except (RuntimeError, AssertionError) as exc:
        problem = str(exc).partition("\n")[0]
        raise ConfigError(f"--device {name} cannot be used here: {problem}") from exc
    return device


class Accelerator:
    """One device, or host memory in its place.

    Attributes:
        device: current one of this process from now on.
        devices: the engine's door to it.
    """

    def __init__(self, name: str | None) -> None:
        """See `resolve` for what it raises."""
        self.device = resolve(name)
        self.devices = Devices()
        self._module = torch.get_device_module(self.device)
        self._module.set_device(self.device)

    @property
    def is_host(self) -> bool:
        """Whether there is no device at all."""
        return self.device.type == HOST

    @property
    def title(self) -> str:
        """What it is."""
        return "host memory only" if self.is_host else self.devices.name()

    def put(self, tensor: Tensor) -> Tensor:
        """It, on the device."""
        return tensor.to(self.device)

    def run(self, do: Callable[[], Any]) -> None:
        """A piece of training: queued, not done."""
        do()

    def spin(self) -> None:
        """Keep training's stream busy for some milliseconds, where the backend can."""
        getattr(self._module, "_sleep", lambda cycles: None)(_SPIN_CYCLES)

    def drain(self) -> None:
        """Wait for everything that is queued on the device."""
        self._module.synchronize()

    def pass_stream(self) -> None:
        """Wait for everything that is queued on training's stream."""
        if not self.is_host:
            self._module.current_stream(self.device).synchronize()

    def tidy(self) -> None:
        """Give memory back that nobody uses."""
        getattr(self._module, "empty_cache", lambda: None)()

    def page_locked(self, nbytes: int) -> Tensor:
        """Host memory that the device reads and writes by itself."""
        if self.is_host:
            return torch.empty(nbytes, dtype=torch.uint8)
        return torch.frombuffer(self.devices.buffer(nbytes, self.device), dtype=torch.uint8)

    def seconds(self, do: Callable[[], Any]) -> float:
        """Of a piece of work, from an idle device to an idle device."""
        self.drain()
        began = time.perf_counter()
        do()
        self.drain()
        return time.perf_counter() - began

    def beside(self, do: Callable[[], Any]) -> Callable[[], bool]:
        """Queue work on a stream of its own; says whether it is done."""
        if self.is_host:
            do()
            return lambda: True
        stream = self._module.Stream(device=self.device)
        with self._module.stream(stream):
            do()
            event = self._module.Event()
            event.record(stream)
        done: Callable[[], bool] = event.query
        return done

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """What queues one copy each on the current stream, as cheaply as can be from Python."""
        runtime = _runtime() if not self.is_host else None
        if runtime is None:
            return partial(_copy_each, targets, sources)
        spans = [
            (target.data_ptr(), source.data_ptr(), source.nbytes)
            for target, source in zip(targets, sources, strict=True)
        ]
        return partial(self._memcpy, runtime, spans, (targets, sources))

    def _memcpy(self, runtime: Any, spans: Sequence[tuple[int, int, int]], alive: object) -> None:
        """Copies by address: `alive` is what keeps the memory there."""
        stream = self._module.current_stream(self.device).cuda_stream
        copy, kind = runtime.cudaMemcpyAsync, runtime.cudaMemcpyKind.cudaMemcpyDefault
        for target, source, nbytes in spans:
            (code,) = copy(target, source, nbytes, kind, stream)
        assert int(code) == 0, f"cudaMemcpyAsync: {code}"


class Marks:
    """Moments in training's stream, at which nobody waits; without a device, moments of the host."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._found: list[Any] = []

    def mark(self) -> None:
        """One more."""
        if self._accelerator.is_host:
            self._found.append(time.perf_counter())
            return
        event = torch.get_device_module(self._accelerator.device).Event(enable_timing=True)
        event.record()
        self._found.append(event)

    def seconds(self) -> list[float]:
        """Between each and the next; waits for the device."""
        self._accelerator.drain()
        pairs = zip(self._found, self._found[1:], strict=False)
        if self._accelerator.is_host:
            return [after - before for before, after in pairs]
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


class Raw:
    """One copy for each leaf and nothing else: what the link does at best.

    The far side is a ring of page-locked memory, or of the device's, in which leaves follow one another.

    Attributes:
        nbytes: of all leaves, which is what each copy moves.
        to_host, within: queue the leaves' bytes to the host, or to other memory of the device.
        pieces: as many bytes to the host, in pieces as large as the ring.
        from_host: the other way; the leaves then hold anything.
    """

    def __init__(self, accelerator: Accelerator, leaves: Sequence[Tensor]) -> None:
        flat = [leaf.reshape(-1).view(torch.uint8) for leaf in leaves]
        self.nbytes = sum(leaf.nbytes for leaf in flat)
        ring = max(min(self.nbytes, _RING_BYTES), *(leaf.nbytes for leaf in flat))
        near = torch.empty(ring, dtype=torch.uint8, device=accelerator.device)
        host = accelerator.page_locked(ring)
        spans = list(_around(host, flat))
        pieces = [ring] * (self.nbytes // ring) + [self.nbytes % ring or 1]
        self.to_host = accelerator.copies(spans, flat)
        self.from_host = accelerator.copies(flat, spans)
        self.within: Callable[[], Any] = partial(
            torch._foreach_copy_, list(_around(near, flat)), flat
        )
        self.pieces = accelerator.copies([host[:n] for n in pieces], [near[:n] for n in pieces])


def _around(ring: Tensor, leaves: Sequence[Tensor]) -> Iterator[Tensor]:
    """A place in the ring for each leaf, from the begin again where it ends."""
    begin = 0
    for leaf in leaves:
        if begin + leaf.nbytes > ring.nbytes:
            begin = 0
        yield ring[begin : begin + leaf.nbytes]
        begin += leaf.nbytes


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _runtime() -> Any:
    """NVIDIA's runtime, whose calls cost less than torch's; None where it is not installed."""
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError:
        return None
