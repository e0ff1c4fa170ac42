"""Run something that may block on storage or a device for ever, and stop waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckpt_core.errors import RestoreError, StagingError
from ckpt_core.restore.failures import NoMeans, ReadHung

if TYPE_CHECKING:
    import torch

    from ckpt_core.state import Binding
    from ckpt_core.system.devices import Devices

_Result = TypeVar("_Result")

READ_TIMEOUT_S = 600.0
"""Longest time that one read may take, for readers to which nobody gives another."""


def within(timeout_s: float, action: Callable[[], _Result], *, path: Path) -> _Result:
    """What `action` returns or raises. It changes nothing, so it may be left behind.

    Raises:
        NoMeans: no thread can be started, or memory is used up.
        ReadHung: it took longer than `timeout_s`; `path` is what it was reading.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as exc:  # raised again in the thread that waits
            errors.append(exc)

    thread = threading.Thread(target=work, name="ckpt-restore", daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        raise NoMeans(path, exc) from exc
    thread.join(timeout_s)
    try:
        if errors and isinstance(errors[0], MemoryError):
            raise NoMeans(path, errors[0]) from errors[0]
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # It knows this call, and whoever made it.
    if results:
        return results[0]
    raise ReadHung(
        f"{path}: reading it has not ended after {timeout_s:g} s: the storage is probably stuck. "
        "Nothing was changed, on storage or in memory",
        path=path,
    )


def wait_for_devices(devices: Devices, used: Sequence[torch.device], timeout_s: float) -> None:
    """Return once what this thread has queued on some devices is done.

    Raises:
        RestoreError: one of them has failed, or takes longer than `timeout_s`.
    """
    try:
        devices.queued(used).wait(deadline=time.monotonic() + timeout_s)
    except (StagingError, RuntimeError) as exc:
        raise RestoreError(str(exc)) from exc


def wait_for_copies(devices: Devices, binding: Binding, timeout_s: float) -> None:
    """Once this returns every stream of a device finds what the binding's `finish` has put there."""
    used = devices.of_all([*binding.destinations.values(), *binding.copied])
    used = devices.and_current(used) if binding.loads else used
    wait_for_devices(devices, used, timeout_s)
