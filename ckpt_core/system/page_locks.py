"""Page-locked host memory, by the calls of the runtime below torch. Used behind the door to devices alone."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from ckpt_core.units import ALIGN_BYTES

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""

kept: dict[int, object] = {}
"""Mappings by address. What is registered must stay mapped: a device takes whatever comes to lie there
for the old pages."""


def runtime_of(device: torch.device) -> Any:
    """What page-locks memory: CUDA's runtime, which ROCm has under the same names; None: there is none."""
    asked = getattr(torch.get_device_module(device), "cudart", None)
    return None if asked is None else asked()


def register(runtime: Any, address: int, nbytes: int, device: torch.device) -> int:
    """Page-lock memory; what CUDA answers, 0 for done. No error stays behind."""
    code = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if code != 0:
        _forget_error(device)
    return code


def unregister(runtime: Any, address: int, device: torch.device) -> None:
    """Undo `register`, before the memory goes. Idempotent."""
    if int(runtime.cudaHostUnregister(address)) != 0:
        _forget_error(device)


def unregister_and_unmap(runtime: Any, address: int, device: torch.device) -> None:
    """Undo `register` for memory that is in `kept`."""
    unregister(runtime, address, device)
    kept.pop(address, None)


def _forget_error(device: torch.device) -> None:
    # A refusal is the last error of this thread, for the next kernel to fail with.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def locked_by_torch(nbytes: int) -> memoryview:
    """For backends without a call for it; torch keeps the memory for the next who asks."""
    size = nbytes + ALIGN_BYTES
    tensor = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    start = tensor.data_ptr() + -tensor.data_ptr() % ALIGN_BYTES
    memory: Any = (ctypes.c_char * nbytes).from_address(start)
    memory.keeps_alive = tensor
    return memoryview(memory).cast("B")
