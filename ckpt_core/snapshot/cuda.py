"""Everything that is asked of CUDA, in one place; each does nothing on a machine without it.

None of it synchronizes the device: copies go to a stream of the stager, ordered by events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ckpt_core.errors import StagingError


def uses_cuda() -> bool:
    """Whether this process has used CUDA; if not, no tensor can be on a device."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def event_now(tensors: Iterable[torch.Tensor] | None = None) -> Any:
    """An event behind the work queued on the current stream.

    None when CUDA is not in use, or when none of `tensors` is on it.
    """
    if not uses_cuda():
        return None
    if tensors is not None and not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def side_stream(tensors: Iterable[torch.Tensor]) -> Any:
    """A stream for the stager's copies on the device of the first CUDA tensor; None without one."""
    for tensor in tensors:
        if tensor.is_cuda:
            return torch.cuda.Stream(device=tensor.device)  # type: ignore[no-untyped-call]
    return None


@contextlib.contextmanager
def on_stream(stream: Any, behind: Any) -> Iterator[None]:
    """CUDA work inside goes to `stream`, behind the event `behind`; does nothing for None."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        if behind is not None:
            stream.wait_event(behind)
        yield


def synchronize(stream: Any) -> None:
    """Wait for a stream. Called by the stager: it blocks that thread and no stream of training."""
    if stream is not None:
        stream.synchronize()


def free_bytes() -> int:
    """Free memory of the current device."""
    return int(torch.cuda.mem_get_info()[0])


def has_room(nbytes: int) -> bool:
    """Whether clones of so much may go to the current device: a fifth stays for training's own peaks."""
    return nbytes * 5 <= free_bytes() * 4


def device_name() -> str:
    """What the current device is."""
    return str(torch.cuda.get_device_name())


def pin(address: int, nbytes: int) -> None:
    """Page-lock host memory, so that the copy engine of a device can write to it.

    Raises:
        StagingError: the system refuses.
    """
    code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        raise StagingError(
            f"could not page-lock {nbytes} bytes of staging memory (CUDA error {int(code)}): "
            f"lower staging_bytes or raise the limit of locked memory (ulimit -l)"
        )


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
