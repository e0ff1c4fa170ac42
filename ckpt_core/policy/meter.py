"""Times the training loop beside the engine: one `Iteration` for each question of the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ckpt_core.errors import ConfigError
from ckpt_core.policy.activity import Activity
from ckpt_core.policy.ledger import Ledger
from ckpt_core.policy.profile import Profile

_KEPT_UPDATES = 32


class Stall(Protocol):
    """Time that the training thread has spent in the engine."""

    @property
    def seconds(self) -> float:
        """In all so far."""

    @property
    def ended_s(self) -> float:
        """When it last came out, on the monotonic clock."""


class Gauges(Protocol):
    """What a policy sees of the engine: `Checkpointer.gauges`."""

    @property
    def root(self) -> Path:
        """Where steps are saved."""

    @property
    def in_flight(self) -> int:
        """Checkpoints that may be under way at once."""

    @property
    def rank(self) -> int:
        """Of this process among those that save together."""

    @property
    def world_size(self) -> int:
        """How many they are."""

    @property
    def events(self) -> Any:
        """An `EventLog`."""

    @property
    def stall(self) -> Stall:
        """Time lost by training."""

    @property
    def mode(self) -> str:
        """How leaves are staged now."""

    @property
    def every(self) -> Mapping[str, int]:
        """Of which steps each further level takes the multiples, by its URL."""

    def machine(self) -> Mapping[str, Any]:
        """What measured numbers belong to."""

    def headroom_bytes(self) -> int | None:
        """Free memory of the device; None without one."""

    def modes(self, state_bytes: int) -> Sequence[str]:
        """Ways of staging that could be used for so much state, if there is a choice."""

    def prefer(self, mode: str) -> None:
        """Stage in this way from the next save on; does nothing where the user has chosen."""

    def of_first_rank(self, topic: str, value: Any) -> Any:
        """What the first rank gives."""


def gauges_of(checkpointer: object) -> Gauges:
    """What a Checkpointer shows to a policy that is told to `watch` it.

    Raises:
        ConfigError: it is no Checkpointer.
    """
    gauges: Gauges | None = getattr(checkpointer, "gauges", None)
    if gauges is None:
        raise ConfigError(f"watch: {checkpointer!r} is no Checkpointer: pass the one that saves")
    return gauges


class Meter:
    """Fed by `tick` once for each step, on the training thread."""

    def __init__(self, gauges: Gauges) -> None:
        self.gauges = gauges
        self.ledger = Ledger()
        self.activity = Activity()
        self.staging_s: dict[str, float] = {}
        self._stop = gauges.events.subscribe(self.activity.hear)
        self._update_s: deque[float] = deque(maxlen=_KEPT_UPDATES)
        self._step: int | None = None
        self._now_s = self._blocked_s = 0.0

    def close(self) -> None:
        """Hear no more."""
        self._stop()

    def tick(self, step: int, now_s: float) -> None:
        """The loop asks about `step` now; `now_s` is of the monotonic clock."""
        activity, stall = self.activity, self.gauges.stall
        under_way = activity.under_way > 0
        began = activity.take()
        if self._step is not None and step > self._step:
            steps, seconds = step - self._step, now_s - self._now_s
            blocked_s = stall.seconds - self._blocked_s
            if under_way or began or activity.under_way or activity.ended_s > self._now_s:
                self.ledger.add_active(steps, seconds, blocked_s=blocked_s)
            else:
                self.ledger.add_idle(steps, seconds - blocked_s)
                if stall.ended_s > self._now_s:
                    self._update_s.append(now_s - stall.ended_s)
        if activity.staging_s:
            self.staging_s[self.gauges.mode] = activity.staging_s
            activity.staging_s = 0.0
        self._step, self._now_s, self._blocked_s = step, now_s, stall.seconds

    def go_back(self) -> None:
        """Training was restored: what lies between the last question and the next is no iteration."""
        self._step = None
        self.ledger.drop_cycle()

    @property
    def profile(self) -> Profile | None:
        """What was measured; None before a save was committed and its cost is known."""
        base, costs = self.ledger.base(), self.ledger.costs()
        if base is None or not costs or not self.activity.state_bytes:
            return None
        return Profile(
            iteration_s=base.seconds,
            update_s=median(self._update_s) if self._update_s else 0.0,
            staging_s=dict(self.staging_s),
            persist_s=self.activity.persist_s,
            save_s=median(costs) * base.seconds,
            state_bytes=self.activity.state_bytes,
            headroom_bytes=self.gauges.headroom_bytes(),
            mode=self.gauges.mode,
        )
