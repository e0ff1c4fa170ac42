"""A DataLoader whose state says what training has consumed, not what its workers have fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Self, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ckpt_core.data.fetch import Fetcher, Ticket, WorkerInit
from ckpt_core.data.order import Share, mix
from ckpt_core.data.sampler import ResumableSampler
from ckpt_core.errors import ConfigError


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` that goes on, after a restart, with exactly the batch that training wanted next.

    It has `state_dict()` and `load_state_dict()`: put it into the state that is saved; Lightning saves
    it by itself. A batch counts as consumed from the moment when the loop gets it; batches that
    workers have fetched ahead do not count. With `seed_samples`, augmentation that draws from the global
    generators of Python, numpy and torch is bit-identical too, with any number of workers.

    Mid-epoch, a new `iter()` goes on where the last one stopped, so that each sample is seen once;
    `set_epoch` goes to the begin of another epoch. After the last batch, the next epoch follows by
    itself. Nothing starts before the first batch is asked for, so `set_epoch` and `load_state_dict` may
    follow `iter()`. The process's own generators are neither read nor changed.

    Args:
        dataset: map-style, with a length.
        batch_size: samples per batch and rank; None for single samples without a batch dimension.
        shuffle: draw a new order for each epoch.
        seed: of orders and augmentation; the same on all ranks.
        sampler: one of your own, for a rank and world size that differ from the process group's;
            it brings its own `shuffle` and `seed`.
        seed_samples: give each sample random numbers of its own, from (seed, epoch, sample). Else
            workers draw as in a plain DataLoader, and a restart changes what they draw.
        **options: of `DataLoader`: num_workers, drop_last, collate_fn, pin_memory, ...

    Raises:
        ConfigError: an option that would break the order, or a dataset without an order.

    Source: CheckFreq (FAST '21), the resumable data iterator.
    """

    sampler: ResumableSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        sampler: ResumableSampler | None = None,
        seed_samples: bool = True,
        **options: Any,
    ) -> None:
        _check(dataset, sampler, shuffle, options)
        if sampler is None:
            drop_last = bool(options.get("drop_last", False))
            sized = cast(Sized, dataset)
            sampler = ResumableSampler(sized, shuffle=shuffle, seed=seed, drop_last=drop_last)
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **options)
        self.seed_samples = seed_samples
        self._tickets = _Tickets(batch_size or 1)
        self._workers: DataLoader[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; count epochs from here after a restart."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """As `ResumableSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of the whole epoch for this rank, with those that it took before a restart."""
        return self.sampler.batches_taken + self._batches(self.sampler.remaining())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _Iteration(self)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank: what training has consumed as of now."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where `state` says; the number of ranks, of workers and the batch size may differ.

        Raises:
            ConfigError: the state does not fit, as in `ResumableSampler.load_state_dict`.
        """
        self.sampler.load_state_dict(state)
        if self.sampler.consumed and not self._batches(self.sampler.remaining()):
            # With this batch size or number of ranks, drop_last leaves nothing of the epoch.
            self.sampler.end_epoch()

    def start(self) -> tuple[Share, Iterator[Any]]:
        """This rank's samples from now on, and the finished batches of them. For the iteration alone."""
        size = self._tickets.batch_size
        share = self.sampler.begin(unit=size if self.drop_last else 1)
        self._tickets.share = share
        if not len(share.samples):
            self.sampler.consume(share, samples=0, batches=0)  # The epoch is over as it begins.
        if self._workers is None:
            self._workers = self._start_workers()
        return share, iter(self._workers)

    def _batches(self, samples: int) -> int:
        size = self._tickets.batch_size
        return samples // size if self.drop_last else -(-samples // size)

    def _start_workers(self) -> DataLoader[Any]:
        """The loader that does the work. Its "samples" are our batches, already collated."""
        fetcher = Fetcher(
            self.dataset,
            self.collate_fn,
            batched=self.batch_size is not None,
            seeded=self.seed_samples,
        )
        return DataLoader(
            fetcher,
            batch_size=None,
            sampler=self._tickets,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=WorkerInit(self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            # Without one, each iteration would draw from the generator that training uses.
            generator=torch.Generator().manual_seed(mix(self.sampler.seed)),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory_device=self.pin_memory_device,
        )


class _Iteration(Iterator[Any]):
    """One `iter()` of a loader: counts a batch when it hands it out."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._begun: tuple[Share, Iterator[Any]] | None = None
        self._count = 0
        self._failed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = self._loader.start()
        share, source = self._begun
        taken = self._count * (self._loader.batch_size or 1)
        if taken >= len(share.samples):
            self._begun = share, iter(())  # Lets go of the workers, which have nothing left to do.
            raise StopIteration
        # Invariant: the sampler's position is behind the last batch that was handed out. Checked
        # before the next one is, since workers that persist may be fetching for a newer iteration.
        self._loader.sampler.check_current(share)
        try:
            # Its number, since one that failed counts only when the loop gets a later one, or the end:
            # a job that the error ends begins again at it.
            number, batch = next(source)
        except StopIteration:
            if self._failed:  # The last one; it was asked for, and passed over.
                self._consume(share, len(share.samples))
            raise
        except Exception:
            self._failed = True
            raise
        self._consume(share, number + 1)
        return batch

    def _consume(self, share: Share, batches: int) -> None:
        self._count = batches
        samples = min(batches * (self._loader.batch_size or 1), len(share.samples))
        self._loader.sampler.consume(share, samples=samples, batches=batches)


class _Tickets(Sampler[Ticket]):
    """The batches of a share, as orders to whoever fetches them."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.share: Share | None = None

    def __iter__(self) -> Iterator[Ticket]:
        assert self.share is not None, "the loader begins a share before it iterates"
        return self._of(self.share)

    def _of(self, share: Share) -> Iterator[Ticket]:
        for number, begin in enumerate(range(0, len(share.samples), self.batch_size)):
            samples = share.samples[begin : begin + self.batch_size].tolist()
            yield Ticket(share.stream, number, samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _check(dataset: object, sampler: object, shuffle: bool, options: Mapping[str, Any]) -> None:
    """Refuse what would break the order or the count."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ConfigError(
            f"{type(dataset).__name__} gives its own order: ResumableLoader needs a dataset with"
            " len() and [index]. StatefulDataLoader of torchdata resumes iterable ones"
        )
    if sampler is not None and not isinstance(sampler, ResumableSampler):
        raise ConfigError(
            f"sampler={type(sampler).__name__}: ResumableLoader takes a ResumableSampler, or none. For"
            " validation, prediction and overfit_batches, use a plain DataLoader"
        )
    if sampler is not None and shuffle:
        raise ConfigError("shuffle=True beside sampler=: say ResumableSampler(..., shuffle=True)")
    for name in ("batch_sampler", "generator"):
        if options.get(name) is not None:
            raise ConfigError(f"{name}= is not for ResumableLoader, which orders by seed and epoch")
    if not options.get("in_order", True):
        raise ConfigError("in_order=False: batches out of order cannot be counted as consumed")
