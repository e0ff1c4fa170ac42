"""The order of samples, with a state: epoch-seeded, shared by ranks, resumed by one slice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from ckpt_core.data.order import (
    Position,
    Share,
    mix,
    order_digest,
    order_of,
    share_length,
    share_of,
)
from ckpt_core.data.saved import Saved, whole, yes_or_no
from ckpt_core.errors import ConfigError
from ckpt_core.units import parse_count

_BLOCK = 4096  # Indices that become Python numbers at a time: an epoch never is one long list.


class ResumableSampler(DistributedSampler[int]):
    """A sampler whose state says which samples of which epoch all ranks have consumed.

    Each sample of an epoch is drawn exactly once by all ranks together, whatever happens in between:
    a restart in the middle, and a restart with another number of ranks. (Where the ranks cannot share
    evenly, `drop_last` leaves fewer than one sample per rank out, else the first ones fill the gap.)

    Iterating begins at the position that `load_state_dict`, `set_epoch` or the last complete iteration
    left; a complete iteration leaves the begin of the next epoch. An iteration that is abandoned
    moves nothing: like any sampler, this one cannot know what training did with the samples. A
    `ResumableLoader` does know; use that, unless a loader of your own does the counting.

    It derives from `DistributedSampler`, so frameworks that put a sampler for ranks into loaders
    (Lightning, Accelerate) leave this one in place.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order for each epoch from (seed, epoch); else ascending.
        seed: the same on all ranks.
        drop_last: leave out what the ranks cannot share evenly.
        rank: of this process among those that share the data (data-parallel ranks). By default
            that of the process group, asked each time that an iteration begins; 0 without one.
        world_size: how many these are.

    Raises:
        ConfigError: the dataset has no length, or rank and world size contradict each other; `shuffle` is no
            bool, or a number no int.

    Source: CheckFreq (FAST '21): the order of an epoch from a seed that is a function of its number.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"{type(dataset).__name__} has no len(): an order needs a length")
        if (rank is None) != (world_size is None):
            raise ConfigError(f"{rank=}, {world_size=}: give both, or neither")
        if rank is not None and world_size is not None:
            rank, world_size = whole("rank", rank), whole("world_size", world_size)
            if not 0 <= rank < world_size:
                raise ConfigError(f"{rank=} is not one of {world_size=} ranks: they count from 0")
        shuffle, seed = yes_or_no("shuffle", shuffle), whole("seed", seed)
        super().__init__(cast("Dataset[int]", dataset), 1, 0, shuffle, seed, drop_last)
        self._fixed = None if rank is None or world_size is None else (rank, world_size)
        self._position = Position()
        self._share: Share | None = None
        self._yielded = (0, 0)
        self._order: tuple[tuple[int, int, int], Tensor] | None = None
        self._begun: tuple[tuple[int, int], Tensor] | None = None
        self._loaded = False
        self._join()

    @property
    def consumed(self) -> int:
        """Samples of the current epoch that all ranks had consumed where the next iteration begins."""
        return self._position.consumed

    @property
    def batches_taken(self) -> int:
        """Batches of the current epoch that a `ResumableLoader` has handed out on each rank."""
        return self._position.batches

    def remaining(self) -> int:
        """Samples that the next iteration gives to this rank: what is left of the epoch."""
        _, world_size = self._join()
        position = self._position
        whole = self._epoch_order(position) if position.consumed else cast(Sized, self.dataset)
        left = len(whole) - position.consumed
        return share_length(left, world_size, drop_last=self.drop_last)

    def __len__(self) -> int:
        """Samples of the whole epoch for this rank, with those that it took before a restart."""
        return self._position.taken + self.remaining()

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`; nothing happens in that epoch itself, wherever in it.

        So a loop may call it at each epoch, as `DistributedSampler` wants, before or after `iter()`,
        and a resumed position survives the call for its own epoch.

        Raises:
            ConfigError: `epoch` is negative, or no int.
        """
        epoch = whole("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"set_epoch({epoch}): epochs count from 0")
        if epoch == self._position.epoch:
            return
        if self._loaded and self._position.consumed:
            warnings.warn(
                f"set_epoch({epoch}) gives up the position that was restored: epoch"
                f" {self._position.epoch} after {self._position.consumed} samples. To go on there, count"
                " epochs from `.epoch` of the restored sampler or loader",
                stacklevel=2,
            )
        self._move(Position(epoch))
        self._share = None

    def __iter__(self) -> Iterator[int]:
        # A generator on purpose: it begins with the first next(), so set_epoch may follow iter().
        share = self.begin()
        for begin in range(0, len(share.samples), _BLOCK):
            for sample in share.samples[begin : begin + _BLOCK].tolist():
                if share is self._share:
                    self._yielded = (self._yielded[0] + 1, 0)
                yield sample
        if share is self._share:
            self._move(share.after(len(share.samples)))

    def end_epoch(self) -> None:
        """Go to the begin of the next epoch, leaving out what is left of this one."""
        self._move(Position(self._position.epoch + 1))
        self._share = None

    def begin(self, *, unit: int = 1) -> Share:
        """This rank's samples from the current position on; what was begun earlier no longer counts.

        Called by `__iter__` and by a loader that counts for itself, which then calls `consume`.

        Args:
            unit: take a multiple of so many, for batches of which none may be short.

        Raises:
            ConfigError: `unit` is no int of at least 1.
        """
        unit = parse_count(unit, field="unit")
        rank, world_size = self._join()
        order = self._epoch_order(self._position)
        self._begun = ((self._position.epoch, self.seed), order)
        start = min(self._position.consumed, len(order))
        samples = share_of(order, start, rank=rank, world_size=world_size, drop_last=self.drop_last)
        samples = samples[: len(samples) // unit * unit]
        stream = mix(self.seed, self._position.epoch)
        self._share = Share(self._position, samples, world_size, stream)
        self._yielded, self._loaded = (0, 0), False
        return self._share

    def consume(self, share: Share, *, samples: int, batches: int) -> None:
        """Training has taken so many samples of `share` in all: the position is behind them.

        Raises:
            ConfigError: a count is wrong, or the sampler has left `share` by now, so that counting on would
                be wrong.
        """
        samples = parse_count(samples, field="samples", least=0)
        batches = parse_count(batches, field="batches", least=0)
        self.check_current(share)
        self._yielded = (samples, batches)
        self._move(share.after(samples, batches))

    def check_current(self, share: Share) -> None:
        """Raise ConfigError if `share` is not the one that was begun last."""
        if share is not self._share:
            raise ConfigError(
                "this iteration is over: set_epoch, load_state_dict or a newer iteration has taken"
                " the sampler elsewhere. Call iter() again"
            )

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Plain values, the same on every rank: what is consumed if training takes no further sample.

        Args:
            consumed: samples that training has taken on this rank since the last `iter()`. By default
                those that were drawn, which is right unless workers fetch ahead of training.

        Raises:
            ConfigError: `consumed` is not a number of samples of this iteration.
        """
        share, (samples, batches) = self._share, self._yielded
        if consumed is not None:
            consumed = whole("consumed", consumed)
            if share is None or not 0 <= consumed <= len(share.samples):
                drawn = "none was begun" if share is None else f"it has {len(share.samples)}"
                raise ConfigError(f"{consumed=} samples of the latest iteration, but {drawn}")
            samples, batches = consumed, 0
        position = self._position if share is None else share.after(samples, batches)
        order = self._epoch_order(position)
        _, world_size = self._join()
        return Saved(
            position, self.seed, self.shuffle, len(order), world_size, order_digest(order)
        ).encode()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where `state` says, with its seed; the number of ranks may differ from that time's.

        Raises:
            ConfigError: the state is of another dataset (its length differs), of another setting of
                `shuffle`, or not of a sampler; nothing has changed.
        """
        saved, length = Saved.decode(state), len(cast(Sized, self.dataset))
        if saved.length != length:
            raise ConfigError(
                f"the dataset has {length} samples, the one of the saved state had {saved.length}:"
                " the rest of its epoch cannot be told. Restore with the dataset of that run; or"
                f" leave the sampler out of the restore and call set_epoch({saved.position.epoch + 1})"
            )
        if saved.shuffle != self.shuffle:
            raise ConfigError(
                f"shuffle={self.shuffle} here, {saved.shuffle} in the saved state: keep it as it was"
            )
        order = self._draw(saved.position.epoch, saved.seed)
        if order_digest(order) != saved.order:
            raise ConfigError(
                "this release of torch draws another order from the same seed than the one that saved"
                " the state: resume with that release until the end of the epoch"
            )
        self.seed, self._share, self._loaded = saved.seed, None, True
        self._begun = ((saved.position.epoch, saved.seed), order)
        self._move(saved.position)

    # -- inside --------------------------------------------------------------------------------

    def _join(self) -> tuple[int, int]:
        """(rank, world size) as of now: a process group may come up after the sampler was made."""
        if self._fixed is not None:
            self.rank, self.num_replicas = self._fixed
        elif dist.is_available() and dist.is_initialized():
            self.rank, self.num_replicas = dist.get_rank(), dist.get_world_size()
        length = len(cast(Sized, self.dataset))
        self.num_samples = share_length(length, self.num_replicas, drop_last=self.drop_last)
        self.total_size = self.num_samples * self.num_replicas
        return self.rank, self.num_replicas

    def _move(self, position: Position) -> None:
        self._position = position
        self.epoch = position.epoch

    def _epoch_order(self, position: Position) -> Tensor:
        """The order that `position` lies in, kept until another one is asked for."""
        key = (position.epoch, self.seed)
        # A place within an epoch is one of the order that was begun, whatever became of the dataset since.
        if position.consumed and self._begun is not None and self._begun[0] == key:
            return self._begun[1]
        sized = (*key, len(cast(Sized, self.dataset)))
        if self._order is None or self._order[0] != sized:
            self._order = (sized, self._draw(position.epoch, self.seed))
        return self._order[1]

    def _draw(self, epoch: int, seed: int) -> Tensor:
        stream = mix(seed, epoch) if self.shuffle else None
        return order_of(len(cast(Sized, self.dataset)), stream=stream)
