"""What one run of the suite `papers` does. Checked once and frozen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.checks import check_bound, check_state
from ckpt_core.bench.papers.ways import NAMES
from ckpt_core.bench.settings import RunSettings
from ckpt_core.errors import ConfigError

_LEAST_STATE_BYTES = 2**20
_TMPFS = Path("/dev/shm")


class PapersMeasure(StrEnum):
    """Parts that can be asked for one by one, in the order of a run."""

    THROUGHPUT = "throughput"
    PERSIST = "persist"
    IN_FLIGHT = "in_flight"
    WRITERS = "writers"
    MEMORY = "memory"
    INTERVALS = "intervals"
    SEPARATED = "separated"
    BREAKDOWN = "breakdown"


@dataclass(frozen=True, kw_only=True)
class PapersSettings(RunSettings):
    """One run of the papers' figures; see `RunSettings` for the other fields.

    Attributes:
        memory_root: existing directory on a filesystem in memory, in the place of persistent memory;
            None: /dev/shm where that is, else what needs it is left out.
        state_bytes: of the state in all parts but `persist`.
        iteration_s: an iteration without checkpoints, spent asleep as a host is beside a GPU.
        leaves: tensors in the state.
        intervals: steps between saves of `throughput`.
        sizes: of the state in `persist`, in bytes.
        in_flight: numbers of checkpoints under way, of `in_flight`; `writers` takes the first 3.
        in_flight_intervals: steps between saves there.
        threads: numbers of writers for each checkpoint, of `writers`.
        memory_states: staging memory in sizes of the state, of `memory`.
        chunks: of one checkpoint there.
        one_interval: steps between saves of `writers` and `memory`.
        breakdown_interval: steps between saves of `breakdown`; long enough for storage to keep up.
        interval_points: intervals at which `intervals` measures what a save costs.
        max_overhead: the bound of `intervals`.
        saves: most in one block, or one more than may be under way; a block is made of whole intervals.
        least: iterations that a block has at least, if `saves` allows.
        contenders: presets, or torch_save_fsync; parts that compare others leave those out.
    """

    memory_root: Path | None = None
    state_bytes: int = 200 * 10**6
    iteration_s: float = 0.01
    leaves: int = 160
    intervals: tuple[int, ...] = (1, 2, 5, 10, 25, 50)
    sizes: tuple[int, ...] = (32 * 10**6, 128 * 10**6, 512 * 10**6, 10**9)
    in_flight: tuple[int, ...] = (1, 2, 3, 4)
    in_flight_intervals: tuple[int, ...] = (1, 2, 5, 10)
    threads: tuple[int, ...] = (1, 2, 3, 4)
    memory_states: tuple[float, ...] = (1.0, 1.5, 2.0)
    chunks: tuple[int, ...] = (2, 4, 8)
    one_interval: int = 5
    breakdown_interval: int = 20
    interval_points: tuple[int, ...] = (1, 10, 50)
    max_overhead: float = 0.05
    saves: int = 3
    least: int = 50
    contenders: tuple[str, ...] = NAMES
    measures: tuple[PapersMeasure, ...] = tuple(PapersMeasure)

    suite: ClassVar = "papers"
    leasts: ClassVar = {
        **dict.fromkeys(("saves", "least", "one_interval", "breakdown_interval"), 1),
        "leaves": 4,
        "state_bytes": _LEAST_STATE_BYTES,
    }
    numbers: ClassVar = (
        *("intervals", "sizes", "in_flight", "in_flight_intervals", "threads", "chunks"),
        "interval_points",
    )
    trial: ClassVar = {
        "state_bytes": 2 * 2**20,
        "iteration_s": 0.001,
        "leaves": 16,
        "rounds": 2,
        "intervals": (1, 5),
        "sizes": (2**20, 2 * 2**20),
        "in_flight": (1, 2),
        "in_flight_intervals": (1, 5),
        "threads": (1, 3),
        "memory_states": (1.0, 2.0),
        "chunks": (2, 4),
        "one_interval": 2,
        "breakdown_interval": 5,
        "interval_points": (1, 5),
        "saves": 2,
        "least": 5,
    }

    def check(self) -> None:
        """Sizes have room for the leaves; parts are parts."""
        for size in (self.state_bytes, *self.sizes):
            check_state(state_bytes=size, leaves=self.leaves)
        if not self.iteration_s > 0:
            raise ConfigError(f"iteration_s={self.iteration_s} must be above 0, such as 0.02")
        check_bound(self.max_overhead)
        if not self.memory_states or min(self.memory_states) < 1:
            raise ConfigError(
                f"memory_states={self.memory_states} must be numbers of at least 1: a checkpoint that "
                "is not pipelined is staged as a whole"
            )
        if self.memory_root is not None and not self.memory_root.is_dir():
            raise ConfigError(f"memory_root={str(self.memory_root)!r} is not an existing directory")

    def saves_of(self, interval: int, in_flight: int) -> int:
        """How many whole intervals a block has; one more than may be under way, so that the last waits."""
        most = max(self.saves, in_flight + 1)
        return min(most, max(1, -(-self.least // interval)))

    @property
    def memory(self) -> Path | None:
        """The filesystem in memory."""
        if self.memory_root is not None:
            return self.memory_root
        return _TMPFS if os.path.ismount(_TMPFS) and os.access(_TMPFS, os.W_OK) else None
