"""Levels beyond the root, as a save sees them. `ckpt_core.levels` answers; here is what is asked, and that
there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.coordination import Aside
from ckpt_core.errors import ConfigError
from ckpt_core.system.threads import Worker
from ckpt_core.types import Destination

Reaching = Callable[[int | str], Future[None]]
"""See `SaveHandle.reached`."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A save that is under way, and of which somebody may ask where it has come to.

    Attributes:
        attempt: its id.
        committed: as in its handle.
        destination: of named files; None: it becomes a step.
    """

    step: int
    attempt: str
    committed: Future[Path]
    destination: Destination | None = None

    @property
    def has_committed(self) -> bool:
        """Whether it is there: not under way, failed or cancelled."""
        committed = self.committed
        return committed.done() and not committed.cancelled() and committed.exception() is None


@dataclass(frozen=True, slots=True)
class LevelGauge:
    """How far a level is.

    Attributes:
        url: which.
        newest: the newest step that is whole there; None: none is known of.
        lag_steps: how far that is behind the newest committed step of the root; None: one of both is missing.
        sending: the step that is on its way; None: none is.
        sent_bytes, total_bytes: of that one.
        bytes_all: what has been sent in all since the agent began.
        problem: why it does not go on, for people; "" when all is well.
    """

    url: str
    newest: int | None = None
    lag_steps: int | None = None
    sending: int | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    bytes_all: int = 0
    problem: str = ""


class NoLevels:
    """The root is all there is: no thread, no process, no file.

    Attributes:
        stays: the Checkpointer has been made, so that what takes steps on outlives it.
        workers: the threads.
    """

    stays = False
    workers: Sequence[Worker] = ()

    def start(self) -> None:
        """Start the thread. Called before the root is locked."""

    def open(self) -> None:
        """Claim the levels, and have steps taken on. Called on every rank, once the root is locked."""

    def follow(self, save: Followed) -> Reaching:
        """How it can be asked where a save has come to. Called on the training thread; costs nothing."""
        return _no_level

    def aside(self, step: int, attempt: str) -> Aside | None:
        """What the nodes find out with the vote for a step; None: nothing. Called on finisher threads."""
        return None

    def wait(self, level: int | str, *, deadline: float, last: bool = False) -> None:
        """Block until all that is due at a level has come there; see `Checkpointer.wait`."""
        _no_level(level)

    def awaited(self, committed: Sequence[int]) -> Collection[int]:
        """Those committed steps that retention leaves for levels. Never raises, never waits."""
        return ()

    def restored(self, step: int) -> None:
        """All ranks go on from this step. Called on the training thread."""

    def held(self) -> Collection[int]:
        """Steps that parity rests on. Called as `awaited`, and once more when names are gone."""
        return ()

    def gauges(self) -> tuple[LevelGauge, ...]:
        """How far each level is."""
        return ()

    def close(self) -> None:
        """No step comes any more: say so, and end the thread. Waits for no level. Idempotent."""

    def give_up(self) -> None:
        """End the thread within seconds; what was started for a Checkpointer that was never made ends too."""


def _no_level(level: int | str) -> Future[None]:
    raise ConfigError(
        f"level={level!r}: this Checkpointer has no levels: give it levels=[Level(...)]"
    )
