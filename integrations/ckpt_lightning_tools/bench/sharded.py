"""The suites `lightning-fsdp` and `lightning-deepspeed`: two ranks that share a state. Needs no torch.

As the suite `lightning`, under FSDPStrategy (FSDP1) and DeepSpeedStrategy (ZeRO 2), which Lightning has for
GPUs alone: here without the lines that ask for one, over gloo. Figures are those of the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.fits import BASE, FitSettings, suite_of_fits
from ckpt_core.bench.meeting import HOST, free_port
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Setup
from ckpt_core.bench.team import RANKS_ENVIRONMENT, Launch, Started, all_started
from ckpt_deepspeed_tools.bench.crew import free_shared_memory
from ckpt_lightning_tools.bench.suite import MODEL_CHECKPOINT

RANKS = 2
_MODULE = "ckpt_lightning_tools.bench.sharded_worker"


class Pair(Started):
    """Ranks that Lightning lets find each other, at their first fit."""

    def __init__(self, remotes: list[Remote], port: int, timeout_s: float) -> None:
        super().__init__(remotes, timeout_s)
        self._port = port

    def close(self) -> None:
        """They have nothing to give back; idempotent."""
        self.kill()

    def kill(self) -> None:
        """Whatever they do or wait for, and the shared memory that DeepSpeed leaves."""
        super().kill()
        free_shared_memory(self._port)


@dataclass(frozen=True)
class Pairs:
    """Starts the ranks of a way, each of which is told its name."""

    worker: str

    def __call__(self, name: str, folder: Path, timeout_s: float) -> Pair:
        """See `Launch`."""
        root, port = folder / "files", free_port()
        root.mkdir()
        place = {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "NODE_RANK": "0",
            "DS_ACCELERATOR": "cpu",
        }

        def start(rank: int) -> Remote:
            told = {**RANKS_ENVIRONMENT, **place, "LOCAL_RANK": str(rank)}
            return Remote(name, root, timeout_s=timeout_s, worker=self.worker, environment=told)

        return Pair(all_started(RANKS, start), port, timeout_s)


WAYS = {
    OURS: Setup("ckpt-core", "yes", "AsyncCheckpoint(save_last=False)"),
    MODEL_CHECKPOINT: Setup("ModelCheckpoint", "no", "the newest directory is kept"),
    BASE: Setup("no saves", "", "enable_checkpointing=False"),
}
"""In the order of the report."""


@dataclass(frozen=True, kw_only=True)
class ShardedSettings(FitSettings):
    """One run on two ranks."""

    contenders: tuple[str, ...] = tuple(WAYS)

    ways: ClassVar = WAYS

    @property
    def launch(self) -> Launch:
        """Two ranks for each way."""
        return Pairs(self.worker)


@dataclass(frozen=True, kw_only=True)
class FsdpSettings(ShardedSettings):
    """Under FSDPStrategy, with sharded state dicts."""

    suite: ClassVar = "lightning-fsdp"
    worker: ClassVar = f"{_MODULE}:FsdpWorker"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings(ShardedSettings):
    """Under DeepSpeedStrategy, ZeRO 2."""

    suite: ClassVar = "lightning-deepspeed"
    worker: ClassVar = f"{_MODULE}:DeepSpeedWorker"


FSDP, DEEPSPEED = suite_of_fits(FsdpSettings), suite_of_fits(DeepSpeedSettings)
