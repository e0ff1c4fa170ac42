"""What one run of the suite `deepspeed` does. Checked once and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.checks import check_leasts, check_numbers, check_run
from ckpt_core.bench.settings import ModelSize, model_of
from ckpt_core.errors import ConfigError
from ckpt_deepspeed_tools.bench.ways import NAMES

RANKS = 2
"""More than this machine may have cores would measure the cores; fewer have nothing to partition."""

_STAGES = (1, 2, 3)
_LEAST_STATE_BYTES = 2**20


class DeepSpeedMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of one window.

    Attributes:
        every: a save after each `every`-th step, the first one under the clock among them; 0: never.
        lead: steps before the clock starts.
        steps: steps under the clock; a multiple of `every`, so that the last save holds up as many steps as
            the others.
    """

    every: int
    lead: int
    steps: int

    def due(self, step: int) -> bool:
        """Whether there is a save after this step, counted from 1 with the clock."""
        return self.every > 0 and (step - 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """One run under DeepSpeed.

    Attributes:
        root: existing directory to write to; on the filesystem that is to be measured.
        state_bytes: about the tensors of one checkpoint, of all ranks together.
        rounds: turns of each way; every figure is the median over them.
        stages: of ZeRO.
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps under the clock in a window of `train`.
        lead_steps: steps before the clock in it.
        quiet_steps: steps before each save of `save` that tell what a step takes without one.
        tail_steps: least steps after it.
        contenders: names of ways, in the order of the report; the one without saves always runs.
        measures: which groups of figures to take.
        staging_bytes: bound of our staging memory in each process; None leaves the engine's default.
        seed: of the order of turns.
        timeout_s: longest time that one request to a pair of ranks may take.
    """

    root: Path
    state_bytes: int = 64 * 10**6
    rounds: int = 5
    stages: tuple[int, ...] = (1, 3)
    intervals: tuple[int, ...] = (1, 5, 20)
    train_steps: int = 10
    lead_steps: int = 2
    quiet_steps: int = 5
    tail_steps: int = 2
    contenders: tuple[str, ...] = NAMES
    measures: tuple[DeepSpeedMeasure, ...] = tuple(DeepSpeedMeasure)
    staging_bytes: int | None = None
    seed: int = 0
    timeout_s: float = 600.0

    suite: ClassVar[str] = "deepspeed"

    @classmethod
    def kind(cls) -> type[StrEnum]:
        """Of the measures."""
        return DeepSpeedMeasure

    def __post_init__(self) -> None:
        leasts = {"rounds": 1, "train_steps": 2, "lead_steps": 1, "quiet_steps": 1, "tail_steps": 1}
        check_leasts(self, {**leasts, "state_bytes": _LEAST_STATE_BYTES})
        check_numbers(self, "intervals")
        if not self.stages or set(self.stages) - set(_STAGES):
            raise ConfigError(f"stages={self.stages} must be some of {_STAGES}")
        check_run(self, names=NAMES, kind=DeepSpeedMeasure)

    def quick(self) -> DeepSpeedSettings:
        """The same run with a model and a number of rounds that take seconds."""
        return replace(
            self,
            state_bytes=2 * 2**20,
            rounds=2,
            intervals=(1, 2),
            train_steps=2,
            lead_steps=1,
            quiet_steps=2,
            timeout_s=min(self.timeout_s, 120.0),
        )

    def window(self, every: int) -> Window:
        """The window with a save every so many steps."""
        return Window(every, self.lead_steps, every * -(-self.train_steps // every))

    @property
    def model(self) -> ModelSize:
        """A model whose state is about `state_bytes`."""
        return model_of(self.state_bytes)
