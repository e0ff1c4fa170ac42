"""A save that its caller holds open: it goes on until it is sealed or aborted."""

from __future__ import annotations

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.inflight import InFlight
from ckpt_core.types import RAISED_TO_CALLER


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

    def abort(self, raised: BaseException | None = None) -> None:
        """Give the checkpoint up; nothing of it becomes visible. Idempotent.

        Args:
            raised: what the caller is told instead: the other ranks then log it, and do not report it again
                in their next save, as when `save` raises.
        """
        if self._sealed:
            return
        self._sealed = True
        self._inflight.reported = True
        text = f"step {self.step} was aborted by the caller"
        if raised is not None:
            text = f"{RAISED_TO_CALLER}{type(raised).__name__}: {raised}"
        self._inflight.fail(StagingError(text))

    def _check_open(self) -> None:
        if self._sealed:
            raise ConfigError(f"the save of step {self.step} is sealed or aborted: begin a new one")
