"""What one run of the suite `policy` does. Checked once and frozen."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.checks import check_leasts, check_run
from ckpt_core.bench.policy.conditions import NAMES
from ckpt_core.bench.settings import ModelSize, model_of
from ckpt_core.errors import ConfigError

_LEAST_STATE_BYTES = 2**20
_LEAST_FILE_BYTES = 2**20


class PolicyMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    OVERHEAD = "overhead"
    DECISION = "decision"


@dataclass(frozen=True, slots=True)
class Load:
    """What the second job does as long as it is on.

    Attributes:
        cpu_threads: that multiply matrices without a pause.
        disk_threads: that write without a pause, each into a file of its own.
        file_bytes: size of such a file, which is overwritten from its beginning again and again.
    """

    cpu_threads: int
    disk_threads: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How long the parts of a round are, in iterations.

    Attributes:
        settle_saves: saves before the first block.
        pairs: blocks with saves in a round, each with one without saves before it, and one behind the last.
            Many short ones: iterations drift, and only what is close together can be compared.
        base: of a block without saves.
        saving: least of a block with saves, which is made of whole intervals.
        change: least that is looked at after the second job has begun.
        quiet: most that `Auto` is given, before the second job begins, to come back to a short interval.
        limit_s: longest time that a block with saves may take.
    """

    settle_saves: int = 3
    pairs: int = 6
    base: int = 12
    saving: int = 15
    change: int = 100
    quiet: int = 200
    limit_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """One run of CheckFreq's experiment.

    Attributes:
        root: existing directory to write to; on the filesystem that is to be measured.
        state_bytes: parameters and AdamW state of the model.
        rounds: of each condition; every figure is the median over them.
        max_overhead: the bound that `Auto` is given.
        threads: that the training computes with; the engine has what is left, as it has beside a GPU.
        batch, tokens: of one iteration; together with `state_bytes` they set how long it takes. With few
            tokens it is mostly memory traffic, and differs by a fifth from one time to the next.
        load_threads: of the second job that compute; None: as many as there are processors besides
            those that train, and at least one.
        load_writers: of its threads that write, each into a file of its own.
        load_file_bytes: of such a file, which is written again and again.
        blocks: parts of a round.
        questions: decisions of `Auto` that are timed.
        contenders: names of conditions; `auto_alone` always runs, since the others need its interval.
        measures: which groups of figures to take.
        staging_bytes: bound of our staging memory; None leaves the engine's default.
        seed: of the report; nothing here is drawn at random.
        timeout_s: longest time that one part of a round may take.
    """

    root: Path
    state_bytes: int = 128 * 10**6
    rounds: int = 5
    max_overhead: float = 0.05
    threads: int = 1
    batch: int = 1
    tokens: int = 128
    load_threads: int | None = None
    load_writers: int = 1
    load_file_bytes: int = 256 * 2**20
    blocks: Blocks = Blocks()
    questions: int = 100_000
    contenders: tuple[str, ...] = NAMES
    measures: tuple[PolicyMeasure, ...] = tuple(PolicyMeasure)
    staging_bytes: int | None = None
    seed: int = 0
    timeout_s: float = 600.0

    suite: ClassVar[str] = "policy"

    @classmethod
    def kind(cls) -> type[StrEnum]:
        """Of the measures."""
        return PolicyMeasure

    def __post_init__(self) -> None:
        counts = ("rounds", "threads", "batch", "tokens", "load_writers", "questions")
        sizes = {"state_bytes": _LEAST_STATE_BYTES, "load_file_bytes": _LEAST_FILE_BYTES}
        check_leasts(self, {**dict.fromkeys(counts, 1), **sizes})
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(
                f"max_overhead={self.max_overhead} must be above 0 and at most 1, such as 0.05"
            )
        check_run(self, names=NAMES, kind=PolicyMeasure)

    def quick(self) -> PolicySettings:
        """The same run with a model and a number of rounds that take seconds."""
        return dataclasses.replace(
            self,
            state_bytes=2 * 2**20,
            rounds=2,
            tokens=8,
            load_file_bytes=4 * 2**20,
            blocks=Blocks(
                settle_saves=1, pairs=2, base=4, saving=5, change=12, quiet=15, limit_s=1.0
            ),
            questions=2000,
        )

    @property
    def model(self) -> ModelSize:
        """A model whose state is about `state_bytes`."""
        size = model_of(self.state_bytes)
        return dataclasses.replace(size, batch=self.batch, tokens=self.tokens)

    @property
    def load(self) -> Load:
        """The second job."""
        free = len(os.sched_getaffinity(0)) - self.threads
        threads = max(1, free) if self.load_threads is None else self.load_threads
        return Load(threads, disk_threads=self.load_writers, file_bytes=self.load_file_bytes)
