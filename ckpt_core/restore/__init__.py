"""Newest valid step -> live tensors, in parallel, verified on the way.

    read_manifests(step_dir)          what the step consists of; sizes and names checked against the disk
    Restorer(root, ...).restore(...)  bind to the live state, fill it in place, fall back if corrupt
    load(path)                        the same into fresh tensors, without a live state
    verify(path)                      the same into nothing: a report
    LeafReader(step).blocks(leaf)     the bytes of one leaf in order, for tools

Idea: the unit of work is a run of checksum chunks of a file, not a leaf, so ten thousand small leaves cost
no more than one large one, and each byte is verified while it is still in the cache that the copy left it
in. Nothing here writes to storage or takes a lock; the owner of the root is told what is being read and what
was found corrupt.

Source: LightCheck and PCcheck restore by one sequential read; torchsnapshot's memory budget.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_core.restore.directories import committed_directories
from ckpt_core.restore.empty import tell_empty
from ckpt_core.restore.failures import MOST_TRIES, Retired, retired_too_fast
from ckpt_core.restore.leaves import LeafPlace, StepLeaves, StoredLeaf
from ckpt_core.restore.manifests import StepManifest, read_manifests
from ckpt_core.restore.streaming import LeafReader, RankLeaves
from ckpt_core.restore.units import BadChunk
from ckpt_core.restore.verifying import KnownFiles, Report, StepReport, verify
from ckpt_core.restore.watch import Watch

if TYPE_CHECKING:
    from ckpt_core.errors import RestoreWarning
    from ckpt_core.restore.loading import load
    from ckpt_core.restore.request import RestoreRequest
    from ckpt_core.restore.restorer import Restorer
    from ckpt_core.restore.results import Guard, NoGuard, RestoredStep

# These import torch: whoever only looks at manifests or verifies starts without it.
_LAZY = {
    "Guard": "ckpt_core.restore.results",
    "NoGuard": "ckpt_core.restore.results",
    "RestoreRequest": "ckpt_core.restore.request",
    "RestoreWarning": "ckpt_core.errors",
    "RestoredStep": "ckpt_core.restore.results",
    "Restorer": "ckpt_core.restore.restorer",
    "load": "ckpt_core.restore.loading",
}

__all__ = [
    "MOST_TRIES",
    "BadChunk",
    "Guard",
    "KnownFiles",
    "LeafPlace",
    "LeafReader",
    "NoGuard",
    "RankLeaves",
    "Report",
    "RestoreRequest",
    "RestoreWarning",
    "RestoredStep",
    "Restorer",
    "Retired",
    "StepLeaves",
    "StepManifest",
    "StepReport",
    "StoredLeaf",
    "Watch",
    "committed_directories",
    "load",
    "read_manifests",
    "retired_too_fast",
    "tell_empty",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
