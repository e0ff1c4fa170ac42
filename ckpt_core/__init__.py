"""Asynchronous, crash-proof checkpoints for PyTorch training.

    from ckpt_core import Checkpointer, EveryNSteps, Options, RngState

    with Checkpointer("ckpts", Options(in_flight=2)) as ck:
        found = ck.restore(state)            # newest valid step, in place; None if there is none
        for step in range(...):
            loss.backward()
            optimizer.step()                 # waits by itself for the previous snapshot
            if policy.should_save(step):
                ck.save(step, state)         # returns at once; durable behind training

Names are loaded at first use: `ckpt-core ls` starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckpt_core._version import __version__ as __version__
from ckpt_core.errors import (
    BarrierError,
    CkptError,
    CommitError,
    ConfigError,
    CoordinationTimeout,
    CorruptCheckpoint,
    NotCommitted,
    PersistError,
    RestoreError,
    RootBusy,
    StagingError,
    StateMismatch,
    UnknownFormat,
    UntrustedData,
)
from ckpt_core.options import Level, Options
from ckpt_core.policy import Auto, EveryNSteps, EverySeconds, LastStep
from ckpt_core.system.collector import uncollected
from ckpt_core.types import DirectIO, Mode, OnError

if TYPE_CHECKING:
    from ckpt_core.anywhere import committed_directories, committed_steps, load, step_path, verify
    from ckpt_core.checkpointer import Checkpointer
    from ckpt_core.coordination import StoreOptions, TorchStore
    from ckpt_core.levels import bring_directory
    from ckpt_core.observe import Meter
    from ckpt_core.restore import Report, RestoredStep
    from ckpt_core.save import FilesSave, LayerwiseSave, SaveHandle
    from ckpt_core.state import FlatPart, RngState

_LAZY = {
    "Checkpointer": "ckpt_core.checkpointer",
    "FilesSave": "ckpt_core.save",
    "FlatPart": "ckpt_core.state",
    "LayerwiseSave": "ckpt_core.save",
    "Meter": "ckpt_core.observe",
    "Report": "ckpt_core.restore",
    "RestoredStep": "ckpt_core.restore",
    "RngState": "ckpt_core.state",
    "SaveHandle": "ckpt_core.save",
    "StoreOptions": "ckpt_core.coordination",
    "TorchStore": "ckpt_core.coordination",
    "bring_directory": "ckpt_core.levels",
    "committed_directories": "ckpt_core.anywhere",
    "committed_steps": "ckpt_core.anywhere",
    "load": "ckpt_core.anywhere",
    "step_path": "ckpt_core.anywhere",
    "verify": "ckpt_core.anywhere",
}

__all__ = [
    "Auto",
    "BarrierError",
    "Checkpointer",
    "CkptError",
    "CommitError",
    "ConfigError",
    "CoordinationTimeout",
    "CorruptCheckpoint",
    "DirectIO",
    "EveryNSteps",
    "EverySeconds",
    "FilesSave",
    "FlatPart",
    "LastStep",
    "LayerwiseSave",
    "Level",
    "Meter",
    "Mode",
    "NotCommitted",
    "OnError",
    "Options",
    "PersistError",
    "Report",
    "RestoreError",
    "RestoredStep",
    "RngState",
    "RootBusy",
    "SaveHandle",
    "StagingError",
    "StateMismatch",
    "StoreOptions",
    "TorchStore",
    "UnknownFormat",
    "UntrustedData",
    "__version__",
    "bring_directory",
    "committed_directories",
    "committed_steps",
    "load",
    "step_path",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(_imported(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """Import with no look for garbage: with torch's objects, two of them take as long as the import."""
    return uncollected(import_module)(module)


def __dir__() -> list[str]:
    return sorted(__all__)
