"""What one benchmark run does: sizes, rounds, contenders, measures. Checked once and frozen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ckpt_core.bench.checks import check_leasts, check_numbers, check_run, check_state
from ckpt_core.bench.contenders import NAMES

SMALL_LEAF_BYTES = 1024
_WIDTHS = (1024, 512, 256, 128, 64, 32)
_LEAST_LAYERS = 2


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


def model_of(state_bytes: int) -> ModelSize:
    """A model whose state is about that size: as wide as leaves it a few layers."""
    for width in _WIDTHS:
        empty = ModelSize(width=width, layers=0, vocabulary=width, batch=2, tokens=64)
        one = dataclasses.replace(empty, layers=1)
        layers = (state_bytes - empty.state_bytes) // (one.state_bytes - empty.state_bytes)
        if layers >= _LEAST_LAYERS:
            break
    model = dataclasses.replace(empty, layers=max(1, layers))
    # Words make up for what is less than a layer.
    word_bytes = empty.state_bytes // width
    more = max(0, state_bytes - model.state_bytes) // word_bytes
    return dataclasses.replace(model, vocabulary=width + more)


def plain(settings: Any) -> dict[str, Any]:
    """The fields of any suite's settings, as a report keeps them."""
    fields = dataclasses.asdict(settings)
    del fields["root"]  # a path says nothing about the figures, and may be private
    return fields


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
        check_leasts(self, leasts)
        check_state(state_bytes=self.state_bytes, leaves=self.leaves)
        check_numbers(self, "intervals")
        check_run(self, names=NAMES, kind=Measure)

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
