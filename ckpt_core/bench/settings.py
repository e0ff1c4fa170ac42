"""What the settings of all suites have in common. Checked once and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

from ckpt_core.bench.checks import check_leasts, check_numbers
from ckpt_core.errors import ConfigError

_WIDTHS = (1024, 512, 256, 128, 64, 32)
_LEAST_LAYERS = 2


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
class RunSettings:
    """What every suite is told. The defaults of `contenders` and `measures` are all that a suite knows.

    Attributes:
        root: existing directory to write to; on the filesystem that is to be measured.
        state_bytes: size of the state.
        rounds: turns of each way; every figure is the median over them.
        contenders: names of ways, in the order of the report.
        measures: which groups of figures to take.
        seed: of the order of turns.
        timeout_s: longest time that one request to a process may take.
        suite: name of the suite.
        leasts: field -> its least value.
        numbers: fields that are numbers of at least 1, one or more.
        trial: field -> its value in a run that takes seconds.
    """

    root: Path
    state_bytes: int
    rounds: int = 5
    contenders: tuple[str, ...]
    measures: tuple[StrEnum, ...]
    seed: int = 0
    timeout_s: float = 600.0

    suite: ClassVar[str]
    leasts: ClassVar[Mapping[str, int]] = {}
    numbers: ClassVar[tuple[str, ...]] = ("intervals",)
    trial: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        check_leasts(self, {"rounds": 1, **self.leasts})
        check_numbers(self, *self.numbers)
        self.check()
        names = self._all("contenders")
        unknown = sorted(set(self.contenders) - set(names))
        if unknown or not self.contenders:
            raise ConfigError(f"unknown contenders {unknown}: known are {', '.join(names)}")
        if not self.measures:
            raise ConfigError(f"measures is empty: choose of {', '.join(self.kind())}")
        if not self.root.is_dir():
            raise ConfigError(f"root={str(self.root)!r} is not an existing directory")

    def check(self) -> None:
        """What a suite wants besides.

        Raises:
            ConfigError: says what is wrong, and what would be right.
        """

    @classmethod
    def kind(cls) -> type[StrEnum]:
        """Of the measures."""
        return type(cls._all("measures")[0])

    @classmethod
    def _all(cls, field: str) -> tuple[Any, ...]:
        """Default of a field."""
        (found,) = [known.default for known in dataclasses.fields(cls) if known.name == field]
        assert isinstance(found, tuple)
        return found

    @classmethod
    def default_root(cls) -> Path:
        """Where a run takes place if nobody says."""
        return Path.cwd()

    def quick(self) -> Self:
        """The same run with a state, a model and a number of rounds that take seconds."""
        return dataclasses.replace(self, **self.trial)
