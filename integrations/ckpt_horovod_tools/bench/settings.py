"""What one run of the suite `horovod` does. Checked once and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.checks import check_leasts, check_numbers, check_run
from ckpt_core.bench.settings import ModelSize, model_of
from ckpt_horovod_tools.bench.ways import NAMES

RANKS = 2
"""More than this machine may have cores would measure the cores; fewer have nothing to reduce."""

_LEAST_STATE_BYTES = 2**20


class HorovodMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The iterations of one window, counted from 1.

    Attributes:
        every: a save at the end of each `every`-th iteration; the first one under the clock is among them.
        warm_saves: at the end of each of so many first iterations too: memory and files are new then.
        lead: iterations before the clock starts.
        steps: iterations under the clock; a multiple of `every`, so that the last save holds up as many
            iterations as the others.
    """

    every: int
    warm_saves: int
    lead: int
    steps: int

    def due(self, iteration: int) -> bool:
        """Whether this iteration is saved."""
        return iteration <= self.warm_saves or (iteration - self.lead - 1) % self.every == 0

    @property
    def saves(self) -> int:
        """All saves of the window."""
        return sum(self.due(number) for number in range(1, self.lead + self.steps + 1))

    @property
    def timed_saves(self) -> int:
        """Those under the clock."""
        return self.steps // self.every


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """One run under Horovod.

    Attributes:
        root: existing directory to write to; on the filesystem that is to be measured.
        state_bytes: parameters and AdamW state of the model, the same on each rank.
        rounds: turns of each way; every figure is the median over them.
        intervals: iterations between saves that are compared with no saves at all.
        train_steps: least iterations under the clock in a window.
        warm_saves: saves at the start of a window, before the clock.
        lead_steps: iterations before the clock, those with `warm_saves` among them.
        contenders: names of ways, in the order of the report; the two without saves always run.
        measures: which groups of figures to take.
        staging_bytes: bound of our staging memory in each process; None leaves the engine's default.
        seed: of the order of turns.
        timeout_s: longest time that one window may take.
    """

    root: Path
    state_bytes: int = 200 * 10**6
    rounds: int = 5
    intervals: tuple[int, ...] = (1, 5, 10, 20)
    train_steps: int = 20
    warm_saves: int = 3
    lead_steps: int = 8
    contenders: tuple[str, ...] = NAMES
    measures: tuple[HorovodMeasure, ...] = tuple(HorovodMeasure)
    staging_bytes: int | None = None
    seed: int = 0
    timeout_s: float = 600.0

    suite: ClassVar[str] = "horovod"

    @classmethod
    def kind(cls) -> type[StrEnum]:
        """Of the measures."""
        return HorovodMeasure

    def __post_init__(self) -> None:
        leasts = {"rounds": 1, "train_steps": 2, "warm_saves": 0, "lead_steps": 1}
        check_leasts(self, {**leasts, "state_bytes": _LEAST_STATE_BYTES})
        check_numbers(self, "intervals")
        check_run(self, names=NAMES, kind=HorovodMeasure)

    def quick(self) -> HorovodSettings:
        """The same run with a model and a number of rounds that take seconds."""
        return replace(
            self,
            state_bytes=2 * 2**20,
            rounds=2,
            intervals=(1, 2),
            train_steps=4,
            lead_steps=4,
        )

    def schedule(self, every: int) -> Schedule:
        """The window with a save every so many iterations."""
        steps = every * -(-self.train_steps // every)
        return Schedule(every, self.warm_saves, self.lead_steps, steps)

    @property
    def model(self) -> ModelSize:
        """A model whose state is about `state_bytes`."""
        return model_of(self.state_bytes)
