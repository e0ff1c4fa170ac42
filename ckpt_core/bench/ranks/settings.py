"""The suite `ranks`: its measures, and the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ckpt_core.bench.checks import check_state
from ckpt_core.bench.contenders import RANKED
from ckpt_core.bench.settings import ModelSize, RunSettings

NAMES = tuple(RANKED)
_MODEL = ModelSize(width=192, layers=4, vocabulary=1024, batch=2, tokens=64)


class RankMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    SAVE = "save"
    TRAIN = "train"
    PLAN = "plan"
    MESSAGES = "messages"


@dataclass(frozen=True, kw_only=True)
class RankSettings(RunSettings):
    """One run with several ranks; see `RunSettings` for the other fields.

    Attributes:
        world_sizes: numbers of processes that save together, one team after the other.
        state_bytes: size of the replicated state that `save` measures.
        leaves: tensors in that state.
        warmups: untimed saves before the first round.
        intervals: steps between saves that `train` compares with no saves at all.
        train_steps: least steps of one training window; a window is a multiple of its interval.
        model: the model of `train`, one replica in each process.
        plan_leaves: leaves of the structures that `plan` shares out.
        plan_ranks: numbers of simulated ranks; for the first of them every rank's plan is made.
        simulated_ranks: numbers of ranks in the simulation of `messages`.
        real_ranks: numbers of ranks (threads) that really commit, to compare the simulation with.
        latencies_s: one-way network latencies of the simulation.
        commits: real commits for each number of ranks.
        staging_bytes: bound of our staging memory in each process; None leaves the engine's default.
    """

    world_sizes: tuple[int, ...] = (1, 2, 4)
    state_bytes: int = 192 * 2**20
    leaves: int = 384
    warmups: int = 3
    intervals: tuple[int, ...] = (5,)
    train_steps: int = 5
    model: ModelSize = _MODEL
    contenders: tuple[str, ...] = NAMES
    measures: tuple[RankMeasure, ...] = tuple(RankMeasure)
    plan_leaves: int = 10_000
    plan_ranks: tuple[int, ...] = (1024, 10_000)
    simulated_ranks: tuple[int, ...] = (16, 64, 256, 1024, 4096, 10_000)
    real_ranks: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    latencies_s: tuple[float, ...] = (0.00005, 0.001)
    commits: int = 7
    staging_bytes: int | None = None

    suite: ClassVar = "ranks"
    leasts: ClassVar = dict.fromkeys(("warmups", "commits", "plan_leaves"), 1) | {
        "leaves": 4,
        "train_steps": 2,
    }
    numbers: ClassVar = ("world_sizes", "intervals", "plan_ranks", "simulated_ranks", "real_ranks")
    trial: ClassVar = {
        "state_bytes": 8 * 2**20,
        "leaves": 24,
        "rounds": 2,
        "warmups": 1,
        "intervals": (2,),
        "train_steps": 2,
        "model": ModelSize(width=32, layers=1, vocabulary=64, batch=1, tokens=8),
        "plan_leaves": 500,
        "plan_ranks": (64, 1000),
        "simulated_ranks": (16, 256),
        "real_ranks": (2, 4),
        "latencies_s": (0.00005,),
        "commits": 3,
    }

    def check(self) -> None:
        """So many leaves must have room in the state."""
        check_state(state_bytes=self.state_bytes, leaves=self.leaves)
