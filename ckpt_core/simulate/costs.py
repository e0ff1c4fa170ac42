"""What is simulated: the job, the machine, and what one checkpoint costs the one on the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from ckpt_core.errors import ConfigError

if TYPE_CHECKING:
    from ckpt_core.simulate.redundancy import Redundancy

MOST_IN_FLIGHT = 64
"""More is of no use: storage holds one more than that, and all of them share its bandwidth."""


class Sharing(StrEnum):
    """How checkpoints that are in flight together share storage."""

    OLDEST_FIRST = "oldest first"
    """The oldest one's bytes go first, so that it commits first."""
    EQUAL = "equal"
    """Each gets the same part of the bandwidth."""


class Kind(StrEnum):
    """What a failure takes with it, in the order of how much; a level survives one, and those before it."""

    PROCESS = "process"
    """The trainer: memory and disks of its machine stay."""
    NODE = "node"
    """A machine, with its memory and its own disk; a step of several is whole no more there."""
    DOMAIN = "domain"
    """All machines of a rack or a switch: also a copy that one of them keeps of another."""
    SITE = "site"
    """All machines of the job, and what they share."""

    @property
    def rank(self) -> int:
        """Its place in the order."""
        return list(Kind).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherLevel:
    """One more root that committed steps are copied to, behind training.

    Attributes:
        every: iterations; steps that are multiples of it go there. What is passed over while a copy is on
            its way never does: the next one is the newest.
        copy_s: from the commit in the first root until a step is whole there, with nothing before it.
        restore_s: from there into the live state, after a failure.
        survives: the worst failure after which its steps are still there.
        redundancy: of nodes that keep one another's steps; None: it lies elsewhere.
    """

    every: int
    copy_s: float
    restore_s: float
    survives: Kind
    redundancy: Redundancy | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a number that is out of range."""
        if self.every < 1:
            raise ConfigError(f"every={self.every} must be at least 1")
        check("seconds", self.copy_s)
        check("restore", self.restore_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job.

    Attributes:
        iteration_s: seconds of one iteration without checkpoints.
        state_bytes: what one writer saves: a rank's or a node's share of the checkpoint.
        update_s: part of the iteration that changes the state; the rest hides a snapshot.
    """

    iteration_s: float
    state_bytes: float
    update_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a number that is out of range."""
        check("iteration_s", self.iteration_s, above=0.0)
        check("state_bytes", self.state_bytes)
        check("update_s", self.update_s)
        if self.update_s >= self.iteration_s:
            raise ConfigError(f"update_s={self.update_s:g} must be below iteration_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine of one writer moves, in bytes per second; each may be infinite.

    Attributes:
        write: to storage, with parallel writers.
        serial: to storage, by one thread that serializes and writes.
        copy: from the device into host memory.
        read: from storage into the live state.
        network: to the memory of another node.
    """

    write: float
    serial: float
    copy: float
    read: float
    network: float

    def __post_init__(self) -> None:
        """Raises ConfigError for a rate that is not above zero."""
        for field in fields(self):
            check(field.name, getattr(self, field.name), above=0.0, endless=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one checkpoint of a strategy takes. The order of events is `Stretch`'s.

    Attributes:
        stall_s: training stands still, whatever else happens.
        snapshot_s: from then on, until the state is out of the way of the next update.
        window_s: time before that update; a longer snapshot makes training wait for the rest.
        persist_s: time that storage needs for it, with storage to itself.
        pipelined: persisting begins with the snapshot, not after it.
        in_flight: checkpoints that may be on their way at a time; one more waits.
        sharing: how they share storage.
        load_s: from storage into the live state, after a failure.
        survives: the worst failure after which committed steps are still there.
        levels: where else they go, in their order.
    """

    stall_s: float = 0.0
    snapshot_s: float = 0.0
    window_s: float = 0.0
    persist_s: float = 0.0
    pipelined: bool = True
    in_flight: int = 1
    sharing: Sharing = Sharing.OLDEST_FIRST
    load_s: float = 0.0
    survives: Kind = Kind.SITE
    levels: tuple[FurtherLevel, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a number that is out of range."""
        for name in ("stall_s", "snapshot_s", "window_s", "persist_s", "load_s"):
            check(name, getattr(self, name))
        if not 1 <= self.in_flight <= MOST_IN_FLIGHT:
            raise ConfigError(f"in_flight={self.in_flight} must be 1 to {MOST_IN_FLIGHT}")

    @property
    def update_wait_s(self) -> float:
        """How long the update after a checkpoint waits for its snapshot."""
        return max(0.0, self.snapshot_s - self.window_s)


def check(name: str, value: float, *, above: float | None = None, endless: bool = False) -> None:
    """Raise unless `value` is a number, finite unless `endless`, and above `above` or at least 0.

    Raises:
        ConfigError: with the name, the value, and what is allowed.
    """
    low = value <= above if above is not None else value < 0
    if math.isnan(value) or low or (math.isinf(value) and not endless):
        least = "at least 0" if above is None else f"above {above:g}"
        raise ConfigError(f"{name}={value:g} must be {least}{'' if endless else ' and finite'}")
