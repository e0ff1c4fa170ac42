"""What one benchmark run does: sizes, rounds, contenders, measures. Checked once and frozen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckpt_core.bench.contenders import NAMES
from ckpt_core.errors import ConfigError

SMALL_LEAF_BYTES = 1024
_LEAST_LEAF_BYTES = 8192


class Suite(StrEnum):
    """Sets of contenders and workloads that belong together."""

    CORE = "core"
    RANKS = "ranks"
    LIGHTNING = "lightning"


class Measure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    RESTORE = "restore"
    LEAVES = "leaves"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The training model: a stack of transformer blocks over random tokens."""

    width: int = 384
    layers: int = 4
    vocabulary: int = 2048
    batch: int = 2
    tokens: int = 64

    @property
    def state_bytes(self) -> int:
        """Upper estimate of parameters plus two AdamW moments, in float32."""
        blocks = self.layers * (12 * self.width**2 + 13 * self.width)
        return 12 * (blocks + 2 * self.vocabulary * self.width + self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One benchmark run.

    Attributes:
        root: existing directory to write to; on the filesystem that is to be measured.
        state_bytes: size of the state that `save` and `restore` measure.
        leaves: tensors in that state.
        small_leaves: tensors of 1 KiB in the state that `leaves` measures.
        rounds: turns of each contender; every figure is the median over them.
        warmups: untimed saves before the first round (staging memory, recycled files).
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps of one training window; a window is a multiple of its interval.
        model: the model of `train`.
        contenders: names, in the order of the report.
        measures: which groups of figures to take.
        staging_bytes: bound of our staging memory; None leaves the engine's default.
        seed: of the order of turns.
        timeout_s: longest time that one operation of a contender may take.
    """

    root: Path
    state_bytes: int = 768 * 2**20
    leaves: int = 384
    small_leaves: int = 10_000
    rounds: int = 5
    warmups: int = 3
    intervals: tuple[int, ...] = (1, 5, 10, 25, 50)
    train_steps: int = 10
    model: ModelSize = ModelSize()
    contenders: tuple[str, ...] = NAMES
    measures: tuple[Measure, ...] = tuple(Measure)
    staging_bytes: int | None = None
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        leasts = {"leaves": 4, "small_leaves": 1, "rounds": 1, "warmups": 1, "train_steps": 2}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        least = self.leaves * _LEAST_LEAF_BYTES
        if self.state_bytes < least:
            raise ConfigError(
                f"state_bytes={self.state_bytes} is too small for {self.leaves} leaves: "
                f"use at least {least} bytes, or fewer leaves"
            )
        if not self.intervals or min(self.intervals) < 1:
            raise ConfigError(f"intervals={self.intervals} must be steps of at least 1")
        unknown = sorted(set(self.contenders) - set(NAMES))
        if unknown or not self.contenders:
            raise ConfigError(f"unknown contenders {unknown}: known are {', '.join(NAMES)}")
        if not self.measures:
            raise ConfigError(f"measures is empty: choose of {', '.join(Measure)}")
        if not self.root.is_dir():
            raise ConfigError(f"root={str(self.root)!r} is not an existing directory")

    def quick(self) -> Settings:
        """The same run with a state, a model and a number of rounds that take seconds."""
        return dataclasses.replace(
            self,
            state_bytes=8 * 2**20,
            leaves=24,
            small_leaves=200,
            rounds=2,
            intervals=(1, 2),
            train_steps=2,
            model=ModelSize(width=32, layers=1, vocabulary=64, batch=1, tokens=8),
        )
