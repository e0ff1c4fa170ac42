"""The ways to save under DeepSpeed that are compared. Pure values: needs neither torch nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_core.bench.contenders import OURS

INSTALL = "pip install 'ckpt-core[deepspeed]'"

PERSISTED = "ckpt_core_persisted"
TORCH = "deepspeed_torch"
TORCH_FSYNC = "deepspeed_torch_fsync"
FAST = "deepspeed_fast"
FAST_PYTHON = "deepspeed_fast_python"
DECOUPLED = "deepspeed_decoupled_python"
DECOUPLED_PATCHED = "deepspeed_decoupled_python_patched"
BASE = "no_checkpoint"

CKPT_CORE = "checkpoint_engine"
"""The key of a DeepSpeed configuration that selects ours."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a reader must know about one of them.

    Attributes:
        fsyncs: whether a save that is complete survives a power cut; empty where nothing is saved.
        settings: how it is set up.
        config: keys of the DeepSpeed configuration that select it.
    """

    fsyncs: str
    settings: str
    config: Mapping[str, Any] = field(default_factory=dict)


def _writer(kind: str, *, decoupled: bool = False) -> Mapping[str, Any]:
    # "replica", since the default is an AttributeError at ZeRO 0 and 1 in DeepSpeed 0.19.8.
    return {
        "checkpoint": {"writer": {"type": kind, "data_parallel": "replica", "decoupled": decoupled}}
    }


_PYTHON = "checkpoint.writer: python, data_parallel: replica"
WAYS = {
    OURS: Way("yes", "checkpoint_engine: ckpt_core", {CKPT_CORE: {"type": "ckpt_core"}}),
    PERSISTED: Way(
        "yes",
        "checkpoint_engine: ckpt_core, wait: persisted",
        {CKPT_CORE: {"type": "ckpt_core", "wait": "persisted"}},
    ),
    TORCH: Way("no", "DeepSpeed's default engine"),
    TORCH_FSYNC: Way("yes", "the same, then fsync of all files, directories and `latest`"),
    FAST: Way("no", "checkpoint.writer: fast (AIO), data_parallel: replica", _writer("fast")),
    FAST_PYTHON: Way("no", _PYTHON, _writer("python")),
    DECOUPLED: Way("no", f"{_PYTHON}, decoupled", _writer("python", decoupled=True)),
    DECOUPLED_PATCHED: Way(
        "no",
        f"{_PYTHON}, decoupled; patched: tensors are detached before they go to its child process",
        _writer("python", decoupled=True),
    ),
    BASE: Way("", "no saves"),
}
"""In the order of the report."""

NAMES = tuple(WAYS)
SAVING = tuple([name for name in NAMES if name != BASE])
OWN = (OURS, PERSISTED)
