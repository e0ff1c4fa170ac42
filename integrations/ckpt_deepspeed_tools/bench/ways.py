"""The ways to save under DeepSpeed that are compared, and what is measured of each. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Family, Make, Setup, Unit

INSTALL = "pip install 'ckpt-core[deepspeed]'"

PERSISTED = "ckpt_core_persisted"
TORCH = "deepspeed_torch"
TORCH_FSYNC = "deepspeed_torch_fsync"
FAST = "deepspeed_fast"
FAST_PYTHON = "deepspeed_fast_python"
DECOUPLED = "deepspeed_decoupled_python"
DECOUPLED_PATCHED = "deepspeed_decoupled_python_patched"
NOTHING = "deepspeed_nothing"
BASE = "no_checkpoint"

RANKS = 2
"""More than this machine may have cores would measure the cores; fewer have nothing to partition."""

CKPT_CORE = "checkpoint_engine"
"""The key of a DeepSpeed configuration that selects ours."""


@dataclass(frozen=True, slots=True)
class Way(Setup):
    """One of them; `config` are the keys of the DeepSpeed configuration that select it."""

    config: Mapping[str, Any] = field(default_factory=dict)


def _writer(kind: str, *, decoupled: bool = False) -> Mapping[str, Any]:
    # "replica", since the default is an AttributeError at ZeRO 0 and 1 in DeepSpeed 0.19.8.
    return {
        "checkpoint": {"writer": {"type": kind, "data_parallel": "replica", "decoupled": decoupled}}
    }


_PYTHON = "checkpoint.writer: python, data_parallel: replica"
WAYS = {
    OURS: Way(
        "ckpt-core", "yes", "checkpoint_engine: ckpt_core", {CKPT_CORE: {"type": "ckpt_core"}}
    ),
    PERSISTED: Way(
        "ckpt-core, wait: persisted",
        "yes",
        "checkpoint_engine: ckpt_core, wait: persisted",
        {CKPT_CORE: {"type": "ckpt_core", "wait": "persisted"}},
    ),
    TORCH: Way("DeepSpeed, default", "no", "DeepSpeed's default engine"),
    TORCH_FSYNC: Way(
        "DeepSpeed, default + fsync",
        "yes",
        "the same, then fsync of all files, directories and `latest`",
    ),
    FAST: Way(
        "DeepSpeed, fast",
        "no",
        "checkpoint.writer: fast (AIO), data_parallel: replica",
        _writer("fast"),
    ),
    FAST_PYTHON: Way("DeepSpeed, Python writer", "no", _PYTHON, _writer("python")),
    DECOUPLED: Way(
        "DeepSpeed, decoupled", "no", f"{_PYTHON}, decoupled", _writer("python", decoupled=True)
    ),
    DECOUPLED_PATCHED: Way(
        "DeepSpeed, decoupled, patched",
        "no",
        f"{_PYTHON}, decoupled; patched: tensors are detached before they go to its child process",
        _writer("python", decoupled=True),
    ),
    NOTHING: Way(
        "DeepSpeed, nothing saved",
        "",
        "`save_checkpoint` with a checkpoint engine that does nothing: what is DeepSpeed's own in every call",
    ),
    BASE: Way("no saves", "", "saves nothing"),
}
"""In the order of the report."""

NAMES = tuple(WAYS)
SAVING = tuple([name for name in NAMES if name != BASE])
OWN = (OURS, PERSISTED)

FILELESS = (NOTHING, BASE)
"""Nothing of theirs can be loaded, or becomes durable."""

# -- figures, for each stage of ZeRO -------------------------------------------------------------


def _family(key: str, title: str, unit: Unit = Unit.SECONDS) -> Family:
    return Family(f"zero_{{}}_{key}", f"ZeRO {{}}: {title}", unit)


CALL = _family("call", "Time in save_checkpoint")
"""On the slower rank."""

EXTRA = _family("extra", "Extra time of the following steps")
"""What the steps after it take more than as many without a save, until it is durable or complete."""

STALL = _family("stall", "Stall: save_checkpoint and extra of the steps")
"""Both together: what one save costs training."""

LATEST = _family("until_latest", "Call until `latest` names the tag")
"""Durable or not."""

DURABLE = _family("until_durable", "Call until all is durable")
"""All bytes and `latest`; by an fsync afterwards where a way has none."""

FSYNC = _family("fsync_afterwards", "fsync that the way leaves out")
"""That fsync, of the ways that do not make it themselves; it is no part of their stall."""

MEMORY = _family("peak_memory", "Peak extra memory of a rank", Unit.BYTES)
"""Of the rank that takes most, with its child processes: peak over what training takes."""

AMPLIFICATION = _family("write_amplification", "Bytes written / state bytes", Unit.TIMES)
"""Bytes that storage sees of both ranks for one save over those of the tensors in its files."""

WRITTEN = _family(
    "written_by_rank_{}", "Bytes that rank {} writes for a save / state bytes", Unit.TIMES
)
"""The share of one rank in that."""

STEP = _family("step_every_{}", "Step, a save every {}")
"""Time of one training step on the slower rank, by the steps between saves."""

SLOWDOWN = _family("slowdown_every_{}", "Training slowdown, a save every {} steps", Unit.TIMES)
"""That time over the one without saves of the same round."""

PROCESSOR = _family(
    "train_processor_every_{}", "Processor time, a save every {} steps", Unit.SECONDS_PER_GB
)
"""What training with saves works longer than without, on both ranks together, for each GB saved."""


def _written_by(rank: int) -> Make:
    return lambda stage: WRITTEN(stage, rank)


STEADY: tuple[tuple[str, tuple[tuple[str, Make], ...]], ...] = (
    (
        "Stall of one save",
        (("save_checkpoint", CALL), ("extra of the next steps", EXTRA), ("both", STALL)),
    ),
    (
        "From the call",
        (
            ("until `latest`", LATEST),
            ("until durable", DURABLE),
            ("fsync that is left out", FSYNC),
        ),
    ),
    ("Peak extra memory", (("rank that takes most", MEMORY),)),
    (
        "Bytes written for one save / bytes of the tensors in it",
        (
            ("both ranks", AMPLIFICATION),
            *((f"rank {rank}", _written_by(rank)) for rank in range(RANKS)),
        ),
    ),
)
"""Tables of one stage: their title, and the heading of each figure."""
