"""What a save gives back to the training loop."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.save.in_flight import InFlight


@dataclass(frozen=True, slots=True)
class SaveHandle:
    """A started checkpoint.

    Attributes:
        step: the step it is of.
        staged: done when training may change every leaf; raises what ended the snapshot.
        committed: done when the step is durable and visible, with its directory; raises why it never
            will be. Waiting on it is never needed for safety, only to know.
        stall_s: seconds that the training thread spent in the call that started it.
    """

    step: int
    staged: Future[None]
    committed: Future[Path]
    stall_s: float

    @classmethod
    def of(cls, inflight: InFlight, began: float, *, blocking: bool) -> SaveHandle:
        """The handle of a checkpoint whose call began at `began` (monotonic clock).

        Args:
            blocking: not before it is committed.

        Raises:
            Exception: `blocking`, and it failed.
        """
        if blocking:
            inflight.wait_ended()
        stall_s = time.monotonic() - began
        return cls(inflight.step, inflight.snapshot.staged, inflight.committed, stall_s)
