"""The ways to save, each on one training engine. Needs torch and DeepSpeed.

Call order on every rank alike, on its main thread: `save` -> `fsync` or `settle` -> `load` -> `close`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import ckpt_deepspeed
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.contenders.base import sync_path
from ckpt_deepspeed_tools.bench import ways

_COLOUR = r"\x1b\[[0-9;]*m"


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a tag came back.

    Attributes:
        problem: why the way's own engine could not load it; DeepSpeed's default engine has then.
    """

    problem: str | None = None


class Stock:
    """By an engine of DeepSpeed's own, or by none.

    Attributes:
        root: directory that all ranks share.
        names_durable: whether the files are durable when `latest` names their tag.
        names_anything: whether `latest` ever names a tag.
    """

    names_durable: ClassVar[bool] = False
    names_anything: ClassVar[bool] = True

    def __init__(self, root: Path, engine: Any) -> None:
        self.root = root
        self._engine = engine

    def save(self, tag: str) -> None:
        """Save; returns when training may go on."""
        self._engine.save_checkpoint(str(self.root), tag=tag)

    def fsync(self, tag: str) -> float:
        """Make durable what the way has left to the kernel; seconds on this rank, 0 if there is nothing."""
        began = time.perf_counter()
        sync_tag(self.root, tag)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Nothing is in flight afterwards; a step has been made since the last save."""

    def load(self, tag: str) -> Loaded:
        """Fill the engine from a tag.

        Raises:
            LookupError: DeepSpeed found nothing to load.
        """
        try:
            self._load(tag)
        except Exception as exc:
            problem = _one_line(exc)
            own = self._engine.checkpoint_engine
            self._engine.checkpoint_engine = TorchCheckpointEngine()
            try:
                self._load(tag)
            finally:
                self._engine.checkpoint_engine = own
            return Loaded(problem)
        return Loaded()

    def _load(self, tag: str) -> None:
        path, _ = self._engine.load_checkpoint(str(self.root), tag=tag)
        if path is None:
            raise LookupError(f"DeepSpeed found no tag {tag}")

    def close(self) -> None:
        """Release everything; every rank calls it."""
        self._engine.destroy()


class Fsynced(Stock):
    """DeepSpeed's default, made durable before training goes on."""

    def save(self, tag: str) -> None:
        """Save, and wait for the disk."""
        super().save(tag)
        sync_tag(self.root, tag)

    def fsync(self, tag: str) -> float:
        """`save` did it."""
        return 0.0


class Ours(Stock):
    """`ckpt_deepspeed`: `latest` names what is durable."""

    names_durable = True

    def fsync(self, tag: str) -> float:
        """A tag that `latest` names is durable."""
        return 0.0

    def settle(self) -> None:
        """Wait for the disk."""
        ckpt_deepspeed.wait(self.root)

    def load(self, tag: str) -> Loaded:
        """As a user would; an error is one."""
        self._load(tag)
        return Loaded()

    def close(self) -> None:
        """Waits for what is in flight."""
        super().close()
        ckpt_deepspeed.close()


class Nothing(Stock):
    """DeepSpeed's part of a save, and no other."""

    names_anything = False

    def __init__(self, root: Path, engine: Any) -> None:
        super().__init__(root, engine)
        engine.checkpoint_engine = _Idle()

    def fsync(self, tag: str) -> float:
        """There is nothing."""
        return 0.0


class _Idle(CheckpointEngine):  # type: ignore[misc]
    """Does nothing. Decoupled as ours is: DeepSpeed neither asks for a commit nor writes `latest`."""

    def __init__(self) -> None:
        super().__init__()

    def create(self, info: Any) -> None:
        """Nothing."""

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Nothing."""

    def save(self, state_dict: Any, path: Any) -> None:
        """Nothing."""

    def load(self, path: Any, map_location: Any = None) -> Any:
        """There is nothing."""
        raise LookupError(path)

    def commit(self, info: Any) -> bool:
        """Not called."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As in the base class."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """See the class."""
        return True

    def get_commit_info(self) -> None:
        """Nothing to commit."""

    def cleanup(self) -> None:
        """Nothing."""

    def preserves_storage_sharing(self) -> bool:
        """No clones, which nobody would save."""
        return False


def _one_line(error: Exception) -> str:
    """Without the colours that torch puts into some."""
    return f"{type(error).__name__}: {re.sub(_COLOUR, '', str(error))}".splitlines()[0].strip()


def sync_tag(root: Path, tag: str) -> None:
    """fsync all files of a tag, each rank its own, then the directories and `latest`; all ranks call it."""
    rank = dist.get_rank()
    for path in sorted((root / tag).rglob("*")):
        _, of_a_rank, rest = path.name.partition("zero_pp_rank_")
        writer = int(rest.split("_")[0]) if of_a_rank else 0
        if path.is_file() and writer == rank:
            sync_path(path)
    dist.barrier()
    if rank == 0:
        for path in (root / tag, *(root.glob("latest")), *(root.glob("*.py")), root):
            sync_path(path)
    dist.barrier()


def remove_tags(root: Path, tags: list[str]) -> None:
    """Delete tags and write what else is dirty; rank 0 calls it when nothing is in flight."""
    for tag in tags:
        shutil.rmtree(root / tag, ignore_errors=True)
    os.sync()


CLASSES: dict[str, type[Stock]] = {
    OURS: Ours,
    ways.PERSISTED: Ours,
    ways.TORCH_FSYNC: Fsynced,
    ways.NOTHING: Nothing,
}
"""All others are `Stock`."""


def detach_before_the_child_process() -> None:
    """Let DeepSpeed's decoupled engine save at ZeRO 1; for the rest of this process.

    The fp32 partitions of ZeRO 1 are slices with a gradient function. The engine hands the state to a child
    process over torch.multiprocessing, which refuses such tensors ("Cowardly refusing to serialize non-leaf
    tensor which requires_grad", DeepSpeed 0.19.8). Detached, they are the same memory without the function.
    """
    original = DecoupledCheckpointEngine.save

    def save(self: Any, state_dict: Any, path: str) -> Any:
        return original(self, _detached(state_dict), path)

    DecoupledCheckpointEngine.save = save


def _detached(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach() if tree.requires_grad and not tree.is_leaf else tree
    if type(tree) is dict:
        return {key: _detached(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_detached(item) for item in tree])
    return tree
