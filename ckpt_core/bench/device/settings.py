"""What a run of the suite `device` is asked for."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from ckpt_core.bench.settings import ModelSize, RunSettings, model_of

MEASURED = ("ckpt_core", "ckpt_core_device")
"""This engine's modes that are looked at closely; what `auto` is made of."""

NAMES = (*MEASURED, "dcp_async_overlapped", "torch_save", "torch_checkpointing", "ckpt_core_auto")
"""In the order in which they train: a run that is cut off has the first ones."""

_MEMORY = Path("/dev/shm")
_DISK_STATES = 5
_MB = 2**20


class DeviceMeasure(StrEnum):
    """Groups of figures that can be asked for one by one; the bits are always compared."""

    COPY = "copy"
    FIRST = "first"
    READ = "read"
    TRAIN = "train"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Leaves:
    """A state of leaves of one size."""

    key: str
    title: str
    count: int
    leaf_bytes: int

    def within(self, part: float) -> tuple[int, int]:
        """How many, and how large, where only a part of the state is wanted."""
        count = max(4, round(self.count * part))
        least = round(self.count * self.leaf_bytes * part / count)
        return count, max(1024, min(self.leaf_bytes, least // 1024 * 1024))


LARGE = Leaves("32mb", "leaves of 32 MiB", 300, 32 * _MB)
ALL_LEAVES = (
    LARGE,
    Leaves("1mb", "leaves of 1 MiB", 10_000, _MB),
    Leaves("64kb", "leaves of 64 KiB", 100_000, 64 * 1024),
)


@dataclass(frozen=True, kw_only=True)
class DeviceSettings(RunSettings):
    """One run; see `RunSettings` for the other fields.

    Attributes:
        state_bytes: of the leaves of 32 MiB, and of the model; other leaves are as many in proportion.
        device: None: the current one of this machine.
        every: steps between saves in training.
        base_steps: of each of the two windows without saves.
        warmups: saves before a clock is read.
        batch, tokens, parts: a step is so many parts, with so many tokens of so many texts in each. Ten
            steps are to take longer than a save takes to be durable, or saves wait for one another.
        check_steps: saves whose bits are compared; each has leaves of `check_leaf_bytes`.
        staging_bytes: bound of our staging memory; None: 1.3 states, for one save in flight.
    """

    state_bytes: int = LARGE.count * LARGE.leaf_bytes
    device: str | None = None
    every: int = 10
    base_steps: int = 10
    warmups: int = 2
    batch: int = 8
    tokens: int = 2048
    parts: int = 2
    check_steps: int = 6
    check_leaf_bytes: int = 4 * _MB
    contenders: tuple[str, ...] = NAMES
    measures: tuple[DeviceMeasure, ...] = tuple(DeviceMeasure)
    staging_bytes: int | None = None

    suite: ClassVar = "device"
    leasts: ClassVar = {"state_bytes": 2 * _MB, "warmups": 1, "check_steps": 2} | dict.fromkeys(
        ("every", "base_steps", "batch", "tokens", "parts"), 1
    )
    numbers: ClassVar = ()
    trial: ClassVar[dict[str, Any]] = {
        "state_bytes": 4 * _MB,
        "rounds": 2,
        "every": 2,
        "warmups": 1,
        "base_steps": 2,
        "batch": 1,
        "tokens": 8,
        "check_leaf_bytes": 256 * 1024,
    }

    @property
    def pool_bytes(self) -> int:
        """Staging memory of the engine."""
        return self.staging_bytes or max(32 * _MB, self.state_bytes * 13 // 10)

    @property
    def part(self) -> float:
        """Of the state that the suite is made for."""
        return self.state_bytes / (LARGE.count * LARGE.leaf_bytes)

    @property
    def model(self) -> ModelSize:
        """Of about `state_bytes`: wide, where that leaves it a few layers."""
        run = {"batch": self.batch, "tokens": self.tokens}
        one, two = (ModelSize(width=2048, layers=n, vocabulary=32_000, **run) for n in (1, 2))
        layers = 1 + (self.state_bytes - one.state_bytes) // (two.state_bytes - one.state_bytes)
        if layers > 1:
            return dataclasses.replace(one, layers=layers)
        return dataclasses.replace(model_of(self.state_bytes), **run)

    @property
    def disk_bytes(self) -> int:
        """Files that lie there at once, at most."""
        return self.state_bytes * _DISK_STATES

    @classmethod
    def default_root(cls) -> Path:
        """In memory where there is room, so that no disk hides what a device does."""
        if _MEMORY.is_dir():
            stats = os.statvfs(_MEMORY)
            if stats.f_bavail * stats.f_frsize > cls.state_bytes * _DISK_STATES:
                return _MEMORY
        return Path.cwd()
