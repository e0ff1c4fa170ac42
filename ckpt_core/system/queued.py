"""Work that is queued on devices, and the waits for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
    """

    events: Mapping[torch.device, Event]

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
