"""What the engine asks of its fellow ranks, and the answer when there are none."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt_core.errors import CkptError, CommitError, ConfigError
from ckpt_core.types import RankInfo

Json = Any
"""A value that `json.dumps` writes and `json.loads` gives back unchanged."""


class Reference(Protocol):
    """What must be equal on all ranks: hashes that show whether it is, and a form that says what is not."""

    def marks(self) -> Mapping[str, str]:
        """Hashes by name; all ranks that give a name must give the same hash under it."""

    def encode(self) -> bytes:
        """For rank 0; asked for only when this rank or its fellows are found to differ."""

    def difference(self, one: bytes, other: bytes, rank: int) -> str | None:
        """What differs in `one`, seen from the `encode` of rank `rank`, as a sentence that names the leaf.

        Called on rank 0; None if nothing does. May raise what it likes: the ranks differ anyway.
        """


class Parts(Protocol):
    """Where this rank's parts lie of what all ranks make up together, and whether they do."""

    def say(self) -> Json:
        """For rank 0, with the vote of this rank."""

    def lack(self, said: Sequence[Json]) -> str | None:
        """What no rank has, as a sentence that names the leaf, from what all have said, in rank order; None:
        nothing, the step may be published. Called on rank 0 once plans and marks are found to be equal.
        """


class Aside(Protocol):
    """What the leaders find out together, beside the step that they vote on: it never fails an attempt."""

    def say(self) -> Json:
        """For rank 0, with the vote of this rank; None: nothing. Called on every rank that gives one."""

    def conclude(self, said: Sequence[Json]) -> Json:
        """What follows from what all ranks have said, in rank order; None: nothing. Called on rank 0."""

    def hear(self, concluded: Json) -> None:
        """It is decided to go on, and this follows. Called on leaders, before they publish; may be called on
        some of them only, where others are lost.
        """


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote for an attempt: this rank's files are durable.

    Attributes:
        plan: hash of what must be equal on all ranks.
        data: for the leader of the ranks that share a root.
        reference: what else must be equal, and how it is said what is not.
        aside: what else there is to find out; all ranks that lead give one, or none does.
        parts: what they make up together; with equal plans all ranks give one, or none does.
    """

    plan: str
    data: Json
    reference: Reference | None = None
    aside: Aside | None = None
    parts: Parts | None = None


class Coordination(Protocol):
    """How the ranks that save together learn of each other's success and failure.

    Call order for each attempt, on every rank, from background threads (several attempts at once):

        attempt_id(step) -> agree(...) -> [leaders publish] -> settle(...)        or decline(...)

    Nothing here runs a collective: a slow rank delays commits, not training.
    """

    @property
    def info(self) -> RankInfo:
        """Which rank this process is, of how many. Constant."""

    def gather(self, topic: str, value: Json, timeout_s: float) -> tuple[Json, ...]:
        """Give every rank the value of every rank, in rank order.

        Called by every rank the same number of times for a topic, on the training thread, when a
        Checkpointer is made and in `restore`; never during training. Under a topic that ends in a slash and
        a `call_id`, by every rank the same number of times in that call.

        Raises:
            CoordinationTimeout: a rank did not call it in time, or is dead; names the ranks.
            CommitError: the ranks cannot reach each other.
        """

    def call_id(self) -> str:
        """The same on every rank, and new, for each thing that they do in several gathers together.

        Called on every rank's training thread as it begins; does not communicate.
        """

    def leave(self, call: str, mine: Json, others: Json) -> None:
        """Take part in no more gathers of a call, nor in the one that was interrupted: the other ranks get
        `mine` as this rank's value there and `others` as everyone else's, or in the next one if that one is
        done, and raise. Returns at once; never raises.
        """

    def attempt_id(self, step: int) -> str:
        """`<step, 12 digits>-<8 hex digits>`: the same on every rank, and new, for each save of a step.

        Called on the training thread, once for each `save`; does not communicate.
        """

    def count_anew(self, word: str) -> None:
        """Let ids be the same from here on, also where a save was asked for on some of the ranks alone.

        Called on every rank's training thread at the same place, with a word that rank 0 has drawn and that
        `gather` has just given to all; does not communicate.
        """

    def agree(
        self, attempt_id: str, step: int, ballot: Ballot, timeout_s: float
    ) -> tuple[Json, ...]:
        """Vote yes, and return once this rank may go on.

        From this call on the rank's files of the attempt belong to the leader of its group, which may
        publish them even if this rank gives up, declines or gets an error. Only the leader removes them.

        Returns:
            On a leader, when every rank of the job has voted yes: `data` of the ranks that share its
            root, in rank order. On other ranks `()`, at once after voting.

        Raises:
            CommitError: a rank failed, plans or marks differ, or parts do not make up the whole; `.failures`
                says which and why. No rank may publish the attempt.
            CoordinationTimeout: a rank has not voted in time or is dead. No rank may publish.
        """

    def settle(
        self, attempt_id: str, step: int, error: BaseException | None, timeout_s: float
    ) -> None:
        """After `agree`: leaders say whether they published; returns once all of them have.

        Raises:
            CommitError: a leader could not publish; or, on ranks that do not lead, whatever `agree`
                raised on leaders.
            CoordinationTimeout: a leader has not answered in time: the step may be published or not.
        """

    def decline(self, attempt_id: str, step: int, error: BaseException) -> None:
        """Vote no; returns at once, from whatever thread. Never raises. Idempotent."""

    def refusal(self, attempt_id: str, step: int, timeout_s: float) -> CkptError | None:
        """Why another rank has made the attempt fail; None if none has said so within the time.

        Called instead of `agree`, by a rank that has lost its files and wants to know whether a leader
        has taken them away; `decline` still follows. Never raises.
        """

    def close(self) -> None:
        """Say goodbye; idempotent. Attempts that wait for this rank end badly, at once."""


class NoCoordination:
    """One process that saves alone."""

    info = RankInfo()

    def gather(self, topic: str, value: Json, timeout_s: float) -> tuple[Json, ...]:
        """The value itself; see `Coordination.gather`."""
        return (value,)

    def call_id(self) -> str:
        """Nobody asks; see `Coordination.call_id`."""
        return ""

    def leave(self, call: str, mine: Json, others: Json) -> None:
        """Nobody waits; see `Coordination.leave`."""

    def attempt_id(self, step: int) -> str:
        """A random one; see `Coordination.attempt_id`."""
        return f"{step:012d}-{secrets.token_hex(4)}"

    def count_anew(self, word: str) -> None:
        """Nothing: nobody counts beside this one."""

    def agree(
        self, attempt_id: str, step: int, ballot: Ballot, timeout_s: float
    ) -> tuple[Json, ...]:
        """Agree with oneself, at once; see `Coordination.agree`."""
        return (ballot.data,)

    def settle(
        self, attempt_id: str, step: int, error: BaseException | None, timeout_s: float
    ) -> None:
        """See `Coordination.settle`.

        Raises:
            CommitError: `error` was given; it is the cause and `.failures[0]`.
        """
        if error is None:
            return
        text = f"step {step} is not committed, committed steps are safe: {error}"
        raise CommitError(text, failures={self.info.rank: error}, step=step) from error

    def decline(self, attempt_id: str, step: int, error: BaseException) -> None:
        """Nobody needs to know; see `Coordination.decline`."""

    def refusal(self, attempt_id: str, step: int, timeout_s: float) -> CkptError | None:
        """There is nobody else; see `Coordination.refusal`."""
        return None

    def close(self) -> None:
        """Nothing to do."""


def checked_coordination(value: object) -> Coordination:
    """What a Checkpointer is given; None is one process.

    Raises:
        ConfigError: it is none.
    """
    found: Any = NoCoordination() if value is None else value
    if not isinstance(getattr(found, "info", None), RankInfo):
        raise ConfigError(
            f"coordination={value!r} is none: give a TorchStore, or None for one process"
        )
    checked: Coordination = found
    return checked
