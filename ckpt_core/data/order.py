"""The order of an epoch, and how ranks share what is left of it. Pure functions of numbers."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = (1 << 64) - 1


def mix(*words: int) -> int:
    """63 bits that depend on every bit of every word (splitmix64), such as a seed from (seed, epoch)."""
    state = 0
    for word in words:
        state = (state + (word & _WORD) + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def order_of(length: int, *, stream: int | None) -> Tensor:
    """The samples 0 .. length-1 in the order that `stream` draws, or ascending for None."""
    if stream is None:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(stream)
    return torch.randperm(length, generator=generator, device="cpu")


def order_digest(order: Tensor) -> int:
    """A short check that two processes drew the same order; a function of its first samples."""
    return zlib.crc32(repr(order[:64].tolist()).encode())


def share_length(left: int, world_size: int, *, drop_last: bool) -> int:
    """How many of `left` samples each of `world_size` ranks takes: as many as every other rank."""
    return left // world_size if drop_last else -(-left // world_size)


def share_of(order: Tensor, begin: int, *, rank: int, world_size: int, drop_last: bool) -> Tensor:
    """The samples that `rank` takes of `order[begin:]`: every `world_size`-th one.

    All ranks get equally many: without `drop_last`, the ranks that would get one less take one from
    the front of the epoch once more, as `DistributedSampler` does.
    """
    count = share_length(len(order) - begin, world_size, drop_last=drop_last)
    share = order[begin + rank :: world_size][:count]
    if len(share) < count:
        place = begin + rank + world_size * (count - 1)
        share = torch.cat([share, order[place % len(order)].reshape(1)])
    return share


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the run's data.

    Attributes:
        epoch: the epoch of the next sample.
        consumed: samples of it that all ranks together have consumed; they are a prefix of its order.
        taken: samples of it that each rank has taken, under whatever world sizes.
        batches: batches of it that each rank has taken, as far as a loader counted them.
    """

    epoch: int = 0
    consumed: int = 0
    taken: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of what is left of an epoch, from a position on.

    Attributes:
        start: where the part begins.
        samples: the rank's samples, in order.
        world_size: how many ranks share what is left.
        stream: the number that the order was drawn from; random augmentation starts from it too.
    """

    start: Position
    samples: Tensor
    world_size: int
    stream: int

    def after(self, samples: int, batches: int = 0) -> Position:
        """The position once every rank has taken that many; the end of an epoch is the next one's begin."""
        if samples >= len(self.samples):
            return Position(self.start.epoch + 1)
        return Position(
            self.start.epoch,
            self.start.consumed + samples * self.world_size,
            self.start.taken + samples,
            self.start.batches + batches,
        )
