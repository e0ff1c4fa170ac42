"""What the elastic jobs of these tests train, without Horovod."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

ITEMS = 24
SHARE = 2
"""Items that a rank takes for each batch."""


def make_model() -> nn.Module:
    """Small, with dropout (random numbers of each rank) and BatchNorm (buffers of each rank)."""
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam counts its steps, and weight decay moves parameters whose gradient is zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def make_scheduler(optimizer: Any) -> Any:
    """Changes the learning rate now and then."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)


def loss_of(model: nn.Module, items: list[int]) -> Tensor:
    """The loss of some items of the data."""
    inputs = torch.stack([torch.sin(torch.arange(8.0) * (item + 1)) for item in items])
    targets = torch.tensor([item % 4 for item in items])
    loss: Tensor = nn.functional.cross_entropy(model(inputs), targets)
    return loss


def chunks(items: list[int], size: int = SHARE) -> list[list[int]]:
    """The items of one batch after the other."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def order(epoch: int) -> list[int]:
    """The items of an epoch, as ElasticSampler shuffles them."""
    items = list(range(ITEMS))
    random.Random(epoch).shuffle(items)
    return items
