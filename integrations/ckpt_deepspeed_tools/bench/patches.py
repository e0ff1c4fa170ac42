"""Changes to DeepSpeed without which a peer could not be measured; each is a way of its own, "patched"."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)


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
