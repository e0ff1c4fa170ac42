"""A training run in made-up time: what iterations and saves take is given, what they cost is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_core.observe import EventLog, EventName
from ckpt_core.observe.event import Event
from ckpt_core.policy import Policy
from ckpt_core.save.journal import Stall


@dataclass(frozen=True)
class Load:
    """What things take, in seconds, while a load lasts.

    Attributes:
        iteration_s: without checkpoint activity.
        stall_s: of the training thread inside `save`.
        persist_s: from the begin of a save to its commit.
        slowdown: share that an iteration gets longer while a save is under way.
        noise: relative standard deviation of each iteration.
        spread: relative standard deviation of the slowdown from one save to the next.
    """

    iteration_s: float = 0.1
    stall_s: float = 0.02
    persist_s: float = 0.4
    slowdown: float = 0.3
    noise: float = 0.0
    spread: float = 0.0


@dataclass
class World:
    """The gauges of an engine, and the loop beside it."""

    root: Path
    load: Load = field(default_factory=Load)
    seed: int = 0
    in_flight: int = 2
    rank: int = 0
    world_size: int = 1
    mode: str = "host"
    choices: tuple[str, ...] = ()
    state_bytes: int = 1000
    every: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now_s = 100.0
        self.events = EventLog()
        self.stall = Stall()
        self.saves: list[int] = []
        self.paid: dict[int, float] = {}
        self.without: dict[int, float] = {}
        self.preferred: list[str] = []
        self.stall_of: dict[str, float] = {}
        self.pauses: dict[int, float] = {}
        self._ends: list[float] = []
        self._heavier = 1.0
        self._random = random.Random(self.seed)

    # -- Gauges ----------------------------------------------------------------------------------

    @property
    def gauges(self) -> World:
        return self

    def machine(self) -> dict[str, Any]:
        return {"host": "world"}

    def headroom_bytes(self) -> int | None:
        return None

    def modes(self, state_bytes: int) -> tuple[str, ...]:
        return self.choices

    def prefer(self, mode: str) -> None:
        self.mode = mode
        self.preferred.append(mode)

    def of_first_rank(self, topic: str, value: Any) -> Any:
        return value

    def clock(self) -> float:
        return self.now_s

    # -- the loop --------------------------------------------------------------------------------

    def run(
        self, policy: Policy, steps: range, *, load: Callable[[int], Load] | None = None
    ) -> None:
        """Train, and save where the policy says so."""
        for step in steps:
            if load is not None:
                self.load = load(step)
            self._iterate(step)
            if policy.should_save(step):
                self._save(step)

    def overhead(self, first: int, end: int) -> float:
        """What saves have added to these steps, relative to what they would have taken without."""
        paid = sum(cost for step, cost in self.paid.items() if first <= step < end)
        return paid / sum(self.without[step] for step in range(first, end))

    def _iterate(self, step: int) -> None:
        load = self.load
        self.without[step] = load.iteration_s
        base = load.iteration_s * max(self._random.gauss(1, load.noise), 0.2)
        extra = 0.0
        if any(end > self.now_s for end in self._ends):
            extra = load.iteration_s * load.slowdown * self._heavier
        self.now_s += base + extra + self.pauses.get(step, 0.0)
        self.paid[step] = self.paid.get(step, 0.0) + extra
        for end in [end for end in self._ends if end <= self.now_s]:
            self._ends.remove(end)
            event = Event(
                EventName.COMMITTED, end, step, seconds=load.persist_s, nbytes=self.state_bytes
            )
            self.events.emit(event)

    def _save(self, step: int) -> None:
        stall_s = self.stall_of.get(self.mode, self.load.stall_s)
        self.saves.append(step)
        self.events.emit(Event(EventName.BEGIN, self.now_s, step))
        while len(self._ends) >= self.in_flight:
            stall_s += max(self._ends[0] - self.now_s, 0.0)
            self.events.emit(Event(EventName.COMMITTED, self._ends.pop(0), step, nbytes=1000))
        self._ends.append(self.now_s + stall_s + self.load.persist_s)
        if self.load.spread:
            self._heavier = max(self._random.gauss(1, self.load.spread), 0.0)
        self.now_s += stall_s
        self.stall.seconds += stall_s
        self.stall.ended_s = self.now_s
        self.paid[step + 1] = stall_s
