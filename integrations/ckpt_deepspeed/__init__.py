"""DeepSpeed checkpoints behind training: one key of the configuration.

    import ckpt_deepspeed                                   # before deepspeed.initialize
    config["checkpoint_engine"] = {"type": "ckpt_core"}
    engine, *_ = deepspeed.initialize(model=model, config=config, ...)
    engine.load_checkpoint("ckpts")                         # the newest tag that is whole
    ...
    engine.save_checkpoint("ckpts")                         # returns once copying has been started

The files are those that DeepSpeed writes, under its names, so its tools and plain DeepSpeed read them. A tag
appears, and `latest` moves, when the files of all ranks are durable.

    installing -> engine -> roots -> ckpt_core.Checkpointer.begin_files
    choosing:  which tag is loaded
    tags:      which tag is saved, where ranks were given different ones
"""

from __future__ import annotations

import os

from ckpt_deepspeed.engine import CkptCoreEngine
from ckpt_deepspeed.installing import attach, register
from ckpt_deepspeed.roots import ROOTS
from ckpt_deepspeed.settings import EngineSettings, Wait

__all__ = [
    "CkptCoreEngine",
    "EngineSettings",
    "Wait",
    "attach",
    "close",
    "register",
    "wait",
    "wait_staged",
]


def wait(save_dir: str | os.PathLike[str] | None = None) -> None:
    """Return when everything saved to `save_dir` is durable, and `latest` names it; None: to any directory.

    Called on every rank before something else reads, moves or deletes the files.

    Raises:
        CkptError: a save failed and was not reported yet.
    """
    ROOTS.wait(save_dir)


def wait_staged() -> None:
    """Return when parameters may change; an update waits by itself.

    Raises:
        StagingError: not within `timeout`.
    """
    ROOTS.wait_staged()


def close() -> None:
    """`wait`, and let go of all directories, so that another process may save there.

    Raises:
        CkptError: as for `wait`.
    """
    ROOTS.close()


register()
