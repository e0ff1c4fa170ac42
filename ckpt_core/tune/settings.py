"""What one run of the tuner does. Checked once and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.policy import tuning
from ckpt_core.types import DirectIO

ROOT_MARK, EVERY_MARK = "{root}", "{every}"
"""In the user's command: where it saves, and how many steps apart."""

_LEAF_BYTES = 2 * 2**20
_MOST_LEAVES = 384
_LEAST_BYTES = 2**20
_LEASTS = {"saves": 1, "rounds": 1, "checks": 0, "keep_last": 1, "timeout_s": 1}


class StandIn(StrEnum):
    """What the stand-in for training does in an iteration."""

    IDLE = "idle"
    BUSY = "busy"


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """One run of the tuner, of either form: `model_bytes` and `iteration_s`, or `command`.

    Attributes:
        root: existing directory on the disk to measure.
        model_bytes: size of a made-up state; None with a command.
        iteration_s: one iteration of training; None with a command: measured.
        command: the user's program and its arguments, with `{root}` where it saves; empty without one.
        stand_in: what an iteration does: sleep, or keep all cores busy.
        device: where the made-up state is: "cpu", "cuda".
        max_memory_bytes: most staging memory; None: a quarter of what is free.
        max_storage_bytes: most storage of a root; None: nine tenths of what is free.
        max_overhead: largest part of training time that saves may cost.
        max_interval: largest interval that the user can live with; None: any.
        keep_last: committed steps that are kept; with a command that of the program counts.
        axes: values to try; empty ones stand for the default.
        saves: measured saves in each turn.
        rounds: turns of each finalist; of each candidate when `exhaustive`.
        checks: rounds in which the recommended interval is tried out; 0: it is not.
        minutes: after so long only the finals are still held; None: no bound.
        exhaustive: measure every candidate instead of searching.
        seed: of the order of turns.
        timeout_s: longest time that the program may show no sign of life, and that one save may take.
    """

    root: Path
    model_bytes: int | None = None
    iteration_s: float | None = None
    command: tuple[str, ...] = ()
    stand_in: StandIn = StandIn.IDLE
    device: str = "cpu"
    max_memory_bytes: int | None = None
    max_storage_bytes: int | None = None
    max_overhead: float = 0.05
    max_interval: int | None = None
    keep_last: int = 2
    axes: tuning.Axes = field(default_factory=tuning.Axes)
    saves: int = 5
    rounds: int = 5
    checks: int = 3
    minutes: float | None = None
    exhaustive: bool = False
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, least in _LEASTS.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.root.is_dir():
            raise ConfigError(f"root={str(self.root)!r} is not an existing directory")
        _check_form(self)
        for name in ("iteration_s", "minutes", "max_overhead", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value} must be a number above zero")
        if self.max_interval is not None and self.max_interval < 1:
            raise ConfigError(f"max_interval={self.max_interval} must be at least 1")
        for name in ("in_flight", "writers", "chunk_bytes", "staging_bytes"):
            if any(value < 1 for value in getattr(self.axes, name)):
                raise ConfigError(f"{name}={getattr(self.axes, name)} must be above zero")
        known = [member.value for member in DirectIO]
        for text in self.axes.direct_io:
            if text not in known:
                choices = ", ".join(map(repr, known))
                raise ConfigError(f"direct_io={text!r} is unknown: choose one of {choices}")

    @property
    def leaves(self) -> int:
        """Tensors of the made-up state."""
        return max(4, min(_MOST_LEAVES, (self.model_bytes or 0) // _LEAF_BYTES))


def _check_form(settings: TuneSettings) -> None:
    """Raise ConfigError unless it is one of the two forms, whole."""
    if settings.command:
        if settings.model_bytes is not None:
            raise ConfigError("model_bytes goes with no command: its program has a size of its own")
        if not any(ROOT_MARK in part for part in settings.command):
            raise ConfigError(
                f"put {ROOT_MARK} into the command where it names its directory of checkpoints, for "
                f"example `-- python train.py --root {ROOT_MARK}`: each turn saves into a new directory, "
                f"and your own checkpoints stay untouched"
            )
        return
    if settings.model_bytes is None or settings.iteration_s is None:
        raise ConfigError(
            "give --model-bytes and --iteration-s, or a command to run after `--`, such as "
            f"`-- python train.py --root {ROOT_MARK}`"
        )
    if settings.model_bytes < _LEAST_BYTES:
        raise ConfigError(f"model_bytes={settings.model_bytes} must be at least {_LEAST_BYTES}")
