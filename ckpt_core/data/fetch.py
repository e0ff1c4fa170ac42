"""What runs where samples are fetched, in a worker or not: each sample has random numbers of its own."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, StackDataset, Subset, get_worker_info

from ckpt_core.data.order import mix

_PYTHON, _NUMPY, _TORCH, _COLLATE = range(4)


class Ticket(NamedTuple):
    """An order for one batch.

    Attributes:
        stream: the number that all random numbers of its epoch start from.
        number: of the batch, in the iteration.
        samples: indices into the dataset.
    """

    stream: int
    number: int
    samples: list[int]


class Fetcher(Dataset[Any]):
    """Turns tickets into numbered, finished batches; it takes the place of the dataset in a DataLoader.

    A sample's augmentation depends on (seed, epoch, sample) alone: not on the worker that makes it,
    on what that worker did before, on the batch, or on the number of ranks. That is what makes it
    the same after a restart. In the training process, the generators are put back afterwards.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[Any], Any],
        *,
        batched: bool,
        seeded: bool,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._seeded = seeded

    def __getitem__(self, ticket: Ticket) -> tuple[int, Any]:
        # A worker's generators are its own; those of the training process belong to training.
        guarded = self._seeded and get_worker_info() is None
        if not guarded:
            return ticket.number, self._batch(ticket)
        # No `with`: an interrupt between its calls would put them back when the garbage is collected.
        put_back = _generators()
        try:
            return ticket.number, self._batch(ticket)
        finally:
            try:
                put_back()
            except BaseException:
                put_back()
                raise

    def _batch(self, ticket: Ticket) -> Any:
        samples = self._samples(ticket)
        self._seed(ticket.stream, ticket.samples[0], _COLLATE)
        return self._collate(samples if self._batched else samples[0])

    def _samples(self, ticket: Ticket) -> list[Any]:
        if self._batched and _fetches_batches(self.dataset):
            self._seed(ticket.stream, ticket.samples[0])
            samples: list[Any] = self.dataset.__getitems__(ticket.samples)  # type: ignore[attr-defined]
            return samples
        samples = []
        for sample in ticket.samples:
            self._seed(ticket.stream, sample)
            samples.append(self.dataset[sample])
        return samples

    def _seed(self, *words: int) -> None:
        if not self._seeded:
            return
        random.seed(mix(*words, _PYTHON))
        # Not torch.manual_seed: that would seed CUDA's generators as well.
        torch.default_generator.manual_seed(mix(*words, _TORCH))
        if sys.modules.get("numpy") is not None:
            sys.modules["numpy"].random.seed(mix(*words, _NUMPY) & 0xFFFFFFFF)


def _fetches_batches(dataset: object) -> bool:
    """Whether it makes samples of a batch together: torch's wrappers do if what they wrap does."""
    fetch_all = getattr(type(dataset), "__getitems__", None)
    if isinstance(dataset, Subset) and fetch_all is Subset.__getitems__:
        return _fetches_batches(dataset.dataset)
    if isinstance(dataset, StackDataset) and fetch_all is StackDataset.__getitems__:
        held = dataset.datasets
        return any(map(_fetches_batches, held.values() if isinstance(held, dict) else held))
    return callable(getattr(dataset, "__getitems__", None))


class WorkerInit:
    """First call in a worker: the user's own, who sees the dataset that they passed."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Fetcher):
            # Torch has made it read-only, for users; object's own setter writes it in any release.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._user is not None:
            self._user(worker_id)


def _generators() -> Callable[[], None]:
    """Leaves the generators of this process as they are now, however often it is called."""
    python, torch_cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()

    def put_back() -> None:
        random.setstate(python)
        torch.set_rng_state(torch_cpu)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return put_back
