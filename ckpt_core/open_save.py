"""A save that its caller holds open: it goes on until it is sealed or aborted."""

from __future__ import annotations

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.inflight import InFlight


class OpenSave:
    """What the open forms of a save have in common; used on the training thread.

    One that is neither sealed nor aborted keeps its place among the in-flight checkpoints until `timeout`,
    and then fails.
    """

    def __init__(self, inflight: InFlight) -> None:
        self._inflight = inflight
        self._sealed = False

    @property
    def step(self) -> int:
        """The step it is of."""
        return self._inflight.step

    def abort(self) -> None:
        """Give the checkpoint up; nothing of it becomes visible. Idempotent."""
        if self._sealed:
            return
        self._sealed = True
        self._inflight.reported = True
        self._inflight.fail(StagingError(f"step {self.step} was aborted by the caller"))

    def _check_open(self) -> None:
        if self._sealed:
            raise ConfigError(f"the save of step {self.step} is sealed or aborted: begin a new one")
