"""Work that is queued on devices, and the waits for it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckpt_core.errors import StagingError

_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.01
"""Between two looks at an event, for a wait with a deadline: no device has such a wait."""


class Event(Protocol):
    """A place in the work of one stream."""

    def synchronize(self) -> object:
        """Block the calling thread until everything before it is done."""

    def query(self) -> bool:
        """Whether everything before it is done; blocks no thread."""


class Stream(Protocol):
    """A queue of work of one device: done in order, and ordered with other streams by events alone."""

    @property
    def device(self) -> torch.device:
        """Whose it is."""

    def wait_event(self, event: Any) -> None:
        """Work queued from now on runs behind the event; blocks no thread."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Work that is queued on devices.

    Attributes:
        events: one for each device, behind the work.
        make_current: has a device be the current one of this thread.
    """

    events: Mapping[torch.device, Event]
    make_current: Callable[[torch.device], object] | None = None

    def enter(self) -> None:
        """Before the first wait on a thread of the engine that asks nothing else of devices.

        A wait for an event is a call to the thread's current device, device 0 at first, where it would open
        a context. Any device that is in use does; there is no way back, as for `Devices.use`.
        """
        if self.make_current is not None:
            for device in itertools.islice(self.events, 1):
                # Of a device that has failed the wait says so.
                with contextlib.suppress(RuntimeError):
                    self.make_current(device)

    def wait(self, *, deadline: float | None = None) -> None:
        """Block until it is done.

        Args:
            deadline: on the monotonic clock, for work that training has queued: it may wait for another rank.
                None: the work is copies alone, and the thread not training's.

        Raises:
            StagingError: a device has failed, and nobody knows what it may still write to; or the deadline
                has passed.
        """
        for device, event in self.events.items():
            try:
                done = _wait_for(event, deadline)
            except RuntimeError as exc:
                raise StagingError(
                    f"{device} failed: {exc}. Committed steps are untouched; a device that has failed needs "
                    f"a new process"
                ) from exc
            if not done:
                raise StagingError(
                    f"{device} has not come to an end of what is queued on it in time: perhaps a collective "
                    f"waits for a rank that is gone. Committed steps are untouched"
                )


NOTHING_QUEUED = Queued({})


def _wait_for(event: Event, deadline: float | None) -> bool:
    """Whether it came in time."""
    if deadline is None:
        event.synchronize()
        return True
    pause_s = _PAUSE_S
    while not event.query():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
