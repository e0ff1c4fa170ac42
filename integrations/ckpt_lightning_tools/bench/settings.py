"""What one run of the suite `lightning` does. Checked once and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.checks import check_leasts, check_numbers, check_run
from ckpt_core.bench.settings import ModelSize, model_of
from ckpt_lightning_tools.bench.ways import NAMES

_MODEL = ModelSize(width=256, layers=2, vocabulary=1024, batch=2, tokens=64)
_LEAST_STATE_BYTES = 2**20


class LightningMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of one fit.

    Attributes:
        every: a save after each of so many steps.
        lead: steps before the clock starts; the step after them is saved.
        steps: steps under the clock, a multiple of `every`: the last save has a next step to hold up.
    """

    every: int
    lead: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class LightningSettings:
    """One run under Lightning.

    Attributes:
        root: existing directory to write to; on the filesystem that is to be measured.
        state_bytes: size of the state that `save` measures.
        rounds: turns of each way; every figure is the median over them.
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps under the clock in a fit of `train`.
        lead_saves: saves before the clock starts; the first of a run costs most.
        save_every: steps between saves of `save`.
        saves: saves under the clock in a fit of `save`.
        model: the model of `train`.
        contenders: names of ways, in the order of the report; the one without saves always runs.
        measures: which groups of figures to take.
        staging_bytes: bound of our staging memory; None leaves the engine's default.
        threads: of torch in each process; None leaves as many as there are processors.
        seed: of the order of turns.
        timeout_s: longest time that one fit may take.
    """

    root: Path
    state_bytes: int = 768 * 2**20
    rounds: int = 5
    intervals: tuple[int, ...] = (1, 5, 10, 25, 50)
    train_steps: int = 20
    lead_saves: int = 1
    save_every: int = 2
    saves: int = 1
    model: ModelSize = _MODEL
    contenders: tuple[str, ...] = NAMES
    measures: tuple[LightningMeasure, ...] = tuple(LightningMeasure)
    staging_bytes: int | None = None
    threads: int | None = None
    seed: int = 0
    timeout_s: float = 600.0

    suite: ClassVar[str] = "lightning"

    @classmethod
    def kind(cls) -> type[StrEnum]:
        """Of the measures."""
        return LightningMeasure

    def __post_init__(self) -> None:
        leasts = {"rounds": 1, "train_steps": 2, "lead_saves": 0, "save_every": 1, "saves": 1}
        check_leasts(self, {**leasts, "state_bytes": _LEAST_STATE_BYTES})
        check_numbers(self, "intervals")
        check_run(self, names=NAMES, kind=LightningMeasure)

    def quick(self) -> LightningSettings:
        """The same run with a state, a model and a number of rounds that take seconds."""
        return replace(
            self,
            state_bytes=2 * 2**20,
            rounds=2,
            intervals=(1, 3),
            train_steps=2,
            save_every=2,
            threads=1,
            model=ModelSize(width=32, layers=1, vocabulary=64, batch=1, tokens=8),
        )

    def window(self, every: int) -> Window:
        """The fit of `train` with a save every so many steps."""
        return Window(every, self._lead(every), every * -(-self.train_steps // every))

    def large_window(self) -> Window:
        """The fit of `save`."""
        every = self.save_every
        return Window(every, self._lead(every), every * self.saves)

    def large_model(self) -> ModelSize:
        """A model whose state is about `state_bytes`: as wide as leaves it a few layers."""
        return model_of(self.state_bytes)

    def _lead(self, every: int) -> int:
        if every == 1:
            return self.lead_saves + 2  # the first steps of a run are slow
        return every * (self.lead_saves + 1) - 1
