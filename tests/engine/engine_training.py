"""A small real model whose training changes every kind of state, and a disk that stands still."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from ckpt_core import RngState
from ckpt_core.system.files import Files


class Run:
    """Model, optimizer, scheduler and RNG of one training run."""

    def __init__(self, *, width: int = 64, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 16)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.step = 0

    def forward(self) -> None:
        """Everything of a step but the update; changes the BatchNorm buffers and the RNG."""
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()

    def update(self) -> None:
        """The update; changes parameters and moments."""
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def train(self) -> None:
        """One step."""
        self.forward()
        self.update()

    def state(self) -> dict[str, Any]:
        """The live state."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": RngState(),
            "step": self.step,
        }

    def copy(self) -> dict[str, Any]:
        """The state as it is now, in memory of its own."""
        return clone(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "step": self.step,
                "torch_rng": torch.get_rng_state(),
            }
        )


class Gate(Files):
    """A disk on which writes of shard files stand still while it is shut; then no chunk becomes free."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def shut_for(self, seconds: float) -> None:
        """Stand still for a while, in which a step that does not wait has long been made."""
        self._open.clear()
        timer = threading.Timer(seconds, self._open.set)
        timer.daemon = True
        timer.start()

    def shut(self) -> None:
        """Stand still from now on."""
        self._open.clear()

    def open_up(self) -> None:
        """Go on."""
        self._open.set()

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if isinstance(data, memoryview):
            assert self._open.wait(60)
        super().pwrite(fd, data, offset)


def clone(tree: Any) -> Any:
    """A deep copy of nested dicts and lists of tensors and plain values."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(clone(value) for value in tree)
    return tree


def same(first: Any, second: Any) -> bool:
    """Whether two trees are equal bit for bit (NaNs of the same bits included)."""
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and bytes_of(first) == bytes_of(second)
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Row-major bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
