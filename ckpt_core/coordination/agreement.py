"""What the engine asks of its fellow ranks, and the answer when there are none."""

from __future__ import annotations

from typing import Protocol

from ckpt_core.errors import CommitError
from ckpt_core.types import RankInfo


class Coordination(Protocol):
    """How the ranks that save together learn of each other's success and failure."""

    @property
    def info(self) -> RankInfo:
        """Which rank this process is, of how many. Constant."""

    def agree(
        self, attempt_id: str, step: int, error: BaseException | None, timeout_s: float
    ) -> None:
        """Vote on one attempt, and return once every rank has voted yes.

        Called on every rank exactly once per attempt, from the engine's background thread, when
        this rank's files are durable or have failed. Never called from the training thread, and
        never runs a collective: a slow rank delays commits, not training.

        Args:
            attempt_id: which save; the same on all ranks.
            step: optimizer step of the save.
            error: why this rank failed, or None if its files are durable.
            timeout_s: how long to wait for the other ranks.

        Raises:
            CommitError: a rank failed, this one included; `.failures` says which and why. No rank
                may publish the attempt.
            CoordinationTimeout: a rank has not voted in time. No rank may publish the attempt.
        """


class NoCoordination:
    """One process that saves alone."""

    info = RankInfo()

    def agree(
        self, attempt_id: str, step: int, error: BaseException | None, timeout_s: float
    ) -> None:
        """Agree with oneself, at once; see `Coordination.agree`.

        Raises:
            CommitError: `error` was given; it is the cause and `.failures[0]`.
        """
        if error is None:
            return
        text = f"step {step} is not committed, committed steps are safe: {error}"
        raise CommitError(text, failures={self.info.rank: error}, step=step) from error
