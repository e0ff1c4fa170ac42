"""Datasets that tell what was drawn, and runs that are cut in two."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ckpt_core.data import ResumableLoader, ResumableSampler


class Noisy(Dataset[torch.Tensor]):
    """Sample i is (i, three random numbers of the three generators): augmentation, made visible."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Batched(Noisy):
    """The same, for loaders that fetch a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def ids(batches: Iterable[torch.Tensor]) -> list[int]:
    """The samples of batches of `Noisy`, in order."""
    return [int(row[0]) for batch in batches for row in batch]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def take(loader: Iterable[Any], count: int) -> list[Any]:
    """The next batches, across the ends of epochs, as a loop over epochs sees them."""
    taken: list[Any] = []
    while len(taken) < count:
        before = len(taken)
        for batch in loader:
            taken.append(batch)
            if len(taken) == count:
                break
        assert len(taken) > before, "an empty epoch"
    return taken


def ranks(length: int, world_size: int, **options: Any) -> list[ResumableSampler]:
    return [
        ResumableSampler(range(length), rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def loaders(length: int, world_size: int, batch_size: int, **options: Any) -> list[ResumableLoader]:
    drop_last, seed = options.get("drop_last", False), options.pop("seed", 0)
    samplers = ranks(length, world_size, drop_last=drop_last, seed=seed)
    dataset = Noisy(length)
    return [
        ResumableLoader(dataset, batch_size=batch_size, sampler=sampler, **options)
        for sampler in samplers
    ]


def lockstep(loaders: Sequence[ResumableLoader]) -> Iterator[list[torch.Tensor]]:
    """One batch of every rank at a time; all ranks end together."""
    return iter(list(row) for row in zip(*loaders, strict=True))


def check_each_once(seen: Iterable[int], length: int, *, spare: int) -> None:
    """Every sample of 0 .. length-1 was seen, once, but for at most `spare` that were seen twice."""
    counts = Counter(seen)
    assert set(counts) == set(range(length))
    assert sum(counts.values()) - length <= spare
