"""The suite `levels`: its ways, its measures, and the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.settings import ModelSize, RunSettings, model_of

CAPPED, WITHOUT = "ckpt_core_capped", "no_level"
OBSTORE, MEMCPY = "obstore", "memcpy"
PEERS, PARITY, LM = "ckpt_core_peers", "ckpt_core_parity", "lm_resiliency"
ENGINES = (OURS, CAPPED, WITHOUT)
WAYS = {
    OURS: ("ckpt-core's agent", "a root on --root, one level in the store; its agent"),
    CAPPED: ("ckpt-core's agent, bounded", "the same, with a bound on the bandwidth"),
    WITHOUT: ("ckpt-core, no level", "the same root alone"),
    OBSTORE: (
        "obstore alone",
        "the files of the same step by the client alone, 8 MiB parts, 4 streams; ranges back by 8",
    ),
    MEMCPY: ("memcpy", "each leaf into warm memory, one thread"),
    "sync_boto3": (
        "boto3, as aws s3 sync",
        "upload_file of each file of the step, its defaults: what `aws s3 sync` does",
    ),
    "torch_save_s3fs": ("torch.save to s3fs", "torch.save into a file of s3fs"),
    "dcp_s3torchconnector": ("DCP to s3torchconnector", "DCP's save with S3StorageWriter"),
    PEERS: (
        "ckpt-core, peers=1",
        "two nodes in memory, a whole copy of each in the other's memory",
    ),
    PARITY: ("ckpt-core, parity 2+1", "three nodes in memory, and their parity in memory"),
    LM: (
        "lm-resiliency",
        "two ranks, in-memory copies at the other one over gloo; nothing is verified",
    ),
}
"""Name -> title, and settings in words."""

NAMES = tuple(WAYS)
NODES = {PEERS: 2, PARITY: 3, LM: 2}
"""Ways of several nodes -> how many, a rank each."""

CLIENTS = (OBSTORE, "sync_boto3")
SENDERS = (*CLIENTS, "torch_save_s3fs", "dcp_s3torchconnector")

_MODEL = model_of(128 * 2**20)


class LevelMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    TRAIN = "train"
    UPLOAD = "upload"
    BACK = "back"
    MEMORY = "memory"
    PEERS = "peers"
    PARITY = "parity"


OF = {
    LevelMeasure.TRAIN: ENGINES,
    LevelMeasure.UPLOAD: (OURS, CAPPED, *SENDERS),
    LevelMeasure.BACK: (OURS, OBSTORE),
    LevelMeasure.MEMORY: (OURS, MEMCPY),
    LevelMeasure.PEERS: (PEERS, LM),
    LevelMeasure.PARITY: (PARITY,),
}
"""Measure -> its ways."""


@dataclass(frozen=True, kw_only=True)
class LevelSettings(RunSettings):
    """One run; see `RunSettings` for the other fields.

    Attributes:
        leaves: of the state.
        bandwidth: bound of the way that has one, bytes each second.
        interval: training steps between saves.
        train_steps: of one window.
        pairs: of windows of `interval` steps, in each round.
        model: that trains.
        node_bytes: of the state of each of several nodes.
        memory_root: existing directory in memory; None: without it, the root.
    """

    state_bytes: int = 768 * 2**20
    leaves: int = 384
    bandwidth: int = 200_000_000
    interval: int = 5
    train_steps: int = 30
    pairs: int = 8
    model: ModelSize = _MODEL
    node_bytes: int = 64 * 2**20
    memory_root: Path | None = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    contenders: tuple[str, ...] = NAMES
    measures: tuple[LevelMeasure, ...] = tuple(LevelMeasure)

    suite: ClassVar = "levels"
    leasts: ClassVar = {
        "leaves": 4,
        "train_steps": 2,
        "pairs": 1,
        "interval": 1,
        "bandwidth": 1,
    } | {"node_bytes": 2**20}
    numbers: ClassVar = ()
    trial: ClassVar = {
        "state_bytes": 24 * 2**20,
        "leaves": 24,
        "rounds": 2,
        "bandwidth": 100_000_000,
        "train_steps": 4,
        "interval": 2,
        "pairs": 1,
        "node_bytes": 8 * 2**20,
        "model": ModelSize(width=32, layers=1, vocabulary=64, batch=1, tokens=8),
    }
