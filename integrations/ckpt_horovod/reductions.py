"""The all-reduces of one optimizer: which are under way, which are done, and waiting without spinning.

Horovod's own wait polls without a pause (`WaitAndClear`, mpi_ops_v2.cc): it burns a core, and halves what
other threads of the process get done. Here a wait sleeps between two looks. What Horovod does with a
result (decompress, groups, sparse gradients) stays Horovod's: its `synchronize` runs on one finished handle
at a time.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import poll, synchronize
from torch import Tensor

POLL_S = 5e-5
"""Pause between two looks: far below an all-reduce, and long enough to leave the core to others."""

GIVEN_UP_S = 10.0
"""What is waited for all-reduces of a step that was given up: all ranks have started what they will."""

Key = Tensor | tuple[Tensor, ...]
"""Of a handle: a parameter, or the parameters of a group."""


class Reductions:
    """Reads and completes the handles of a stock Horovod optimizer; used on the training thread.

    Args:
        optimizer: the wrapped optimizer.
        stock: its class as Horovod made it.
    """

    def __init__(self, optimizer: Any, stock: type[Any]) -> None:
        self._optimizer = optimizer
        self._stock = stock

    def issue_missing(self) -> None:
        """Start the all-reduce of every parameter that has none yet, as `synchronize` would."""
        optimizer = self._optimizer
        handles = optimizer._handles
        started = {param for key in handles for param in members(key)}
        for param in optimizer._requires_update - started:
            handles[param] = optimizer._allreduce_grad_async(param)
        for key, (handle, _) in list(handles.items()):
            if handle is None:
                handles[key] = optimizer._allreduce_grad_async(key)

    def under_way(self) -> bool:
        """Whether some are not completed yet."""
        return bool(self._optimizer._handles)

    def finished(self) -> list[Key]:
        """Those whose result is there, in the order in which they were started.

        One that cannot be asked (a sparse gradient is two all-gathers) is given when it is the first that is
        left: completing it waits.
        """
        handles = self._optimizer._handles
        found = [key for key, (handle, _) in handles.items() if _asked(handle)]
        if not found and handles:
            first = next(iter(handles))
            if callable(handles[first][0]):
                return [first]
        return found

    def complete(self, key: Key) -> tuple[Tensor, ...]:
        """Put the result of one into its gradients; the parameters that it is of.

        Raises:
            HorovodInternalError: the all-reduce failed.
        """
        optimizer = self._optimizer
        handles, required = optimizer._handles, optimizer._requires_update
        synchronized = optimizer._synchronized
        optimizer._handles, optimizer._requires_update = {key: handles.pop(key)}, set()
        try:
            self._stock.synchronize(optimizer)
        finally:
            optimizer._handles, optimizer._requires_update = handles, required
            # One rank that took itself for synchronized would not reduce again where the others do.
            optimizer._synchronized = synchronized
        return members(key)

    def wait(self) -> None:
        """Start what is missing, and return when all are finished; none is completed."""
        self.issue_missing()
        for handle, _ in list(self._optimizer._handles.values()):
            while not callable(handle) and not poll(handle):
                time.sleep(POLL_S)


def under_way(optimizers: Iterable[Any]) -> list[int]:
    """Handles of the all-reduces of these that have been started, for `let_end`."""
    handles = [handle for optimizer in optimizers for handle, _ in optimizer._handles.values()]
    return [one for handle in handles for one in _handles_in(handle)]


def let_end(handles: Iterable[int]) -> None:
    """Wait for all-reduces whose results nobody wants; called once all ranks have given up their step.

    Returns after `GIVEN_UP_S` at the latest: one that another rank has never started does not end.
    """
    deadline = time.monotonic() + GIVEN_UP_S
    for handle in handles:
        # Where Horovod is gone, the next step tells; ValueError: a step that failed has completed this one.
        with suppress(HorovodInternalError, ValueError):
            while not poll(handle) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if poll(handle):
                synchronize(handle)


def members(key: Key) -> tuple[Tensor, ...]:
    """The parameters of a handle."""
    return key if isinstance(key, tuple) else (key,)


def _handles_in(handle: Any) -> list[int]:
    """An unfinished group has none, and a sparse gradient those that Horovod's function for it waits for."""
    if not callable(handle):
        return [] if handle is None else [handle]
    held = inspect.getclosurevars(handle).nonlocals
    return [held[name] for name in ("values_handle", "indices_handle") if name in held]


def _asked(handle: Any) -> bool:
    return not callable(handle) and bool(poll(handle))
