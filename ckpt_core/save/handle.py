"""What a save gives back to the training loop."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.save.further import Reaching
from ckpt_core.save.in_flight import InFlight
from ckpt_core.units import html_table, time_text


@dataclass(frozen=True, slots=True, repr=False)
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
    _reaching: Reaching = field(repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step}: {self._stage()}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        waited = f"training waited {time_text(self.stall_s)} in the call"
        return html_table(f"Save of step {self.step}", {self._stage(): waited})

    def _stage(self) -> str:
        for future, text in (
            (self.committed, "committed in {}"),
            (self.staged, "staged, in flight"),
        ):
            if future.done() and not future.cancelled():
                error = future.exception()
                return text.format(future.result()) if error is None else f"failed: {error}"
        return "being staged"

    def reached(self, level: int | str) -> Future[None]:
        """Done when this save is whole at a further level; nothing has to wait for it.

        Of several ranks each may ask. When the Checkpointer is closed the agent goes on, but this future,
        which nobody could tell of it, ends in an error.

        Args:
            level: its number, counted from 1, or its URL as it was given.

        Returns:
            A future that raises `CommitError` where the save never comes there: it failed, the level does not
            take this step (`every`), or has passed it over for newer ones.

        Raises:
            ConfigError: there is no such level.
        """
        return self._reaching(level)

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
        staged, committed = inflight.snapshot.staged, inflight.committed
        return cls(inflight.step, staged, committed, stall_s, inflight.reaching())
