"""Leaves that several ranks take whole are read once among them and sent from one to another.

Each rank of a process group reads its share, in place, and verifies it; then all ranks say whether their
reads were good; only then the first collective runs, on the calling thread. So a corrupt file leaves nobody
waiting in a collective for a rank that has given up.

Source: DeepFreeze IV-C, in the other direction; torch DCP's broadcast from rank 0 reads on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ckpt_core.coordination import Json
from ckpt_core.errors import ConfigError, RestoreError
from ckpt_core.layout import itemsize, nbytes, share_leaves
from ckpt_core.restore.deadline import wait_for_devices
from ckpt_core.restore.destinations import byte_range, flat_bytes, is_flat
from ckpt_core.state import memory_of
from ckpt_core.system.devices import Devices
from ckpt_core.types import LeafSpec, RankInfo
from ckpt_core.units import align_up

BUFFER_BYTES = 64 * 1024 * 1024
"""Most bytes of one collective: larger ones are no faster, and so much memory is needed beside the state."""

_OF_THE_HOST = frozenset({"gloo", "mpi", "ucc", "fake", "undefined"})
"""Backends of collectives that take tensors in host memory, whatever else they take."""

_ALIGN = 16
"""Pieces lie in a buffer so that elements of every dtype can be viewed in place."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Who reads what.

    Attributes:
        ranks: of the group, in its order; `member` is the position of this one.
        specs: the leaves, in the order that all members have.
        mine: `(begin, nbytes)` of the leaves that this rank reads a part of.
    """

    ranks: tuple[int, ...]
    member: int
    specs: Mapping[str, LeafSpec]
    mine: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, member: int) -> dict[str, tuple[int, int]]:
        """What a member reads; a function of the sizes alone."""
        sizes = [(nbytes(spec), itemsize(spec.dtype)) for spec in self.specs.values()]
        shares = share_leaves(sizes, members=len(self.ranks), member=member)
        pairs = zip(self.specs, shares, strict=True)
        return {name: share for name, share in pairs if share is not None}

    def to_json(self) -> Json:
        """What the members must agree about."""
        rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs.values()]
        return [list(self.ranks), xxhash.xxh3_64(repr(rows).encode()).hexdigest()]


class _Piece(NamedTuple):
    """Bytes of a tensor and their place in a buffer."""

    tensor: Tensor
    start: int
    nbytes: int
    at: int


class Broadcast:
    """A process group whose members read for each other."""

    def __init__(self, group: dist.ProcessGroup, devices: Devices) -> None:
        self._group = group
        self._devices = devices
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._member = dist.get_rank(group)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def of(
        cls, group: dist.ProcessGroup | bool, info: RankInfo, devices: Devices
    ) -> Broadcast | None:
        """The group that the caller means; None: every rank reads for itself.

        Raises:
            ConfigError: there is no process group, or its ranks are not those that restore.
        """
        if group is False:
            return None
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("broadcast= needs torch.distributed.init_process_group first")
        here = dist.get_rank(), dist.get_world_size()
        if here != (info.rank, info.world_size):
            raise ConfigError(
                f"broadcast= needs the ranks of the coordination: this process is rank {here[0]} of "
                f"{here[1]} in torch.distributed and rank {info.rank} of {info.world_size} there"
            )
        chosen = dist.group.WORLD if group is True else group
        assert chosen is not None
        if dist.get_rank(chosen) < 0:
            raise ConfigError(f"broadcast=: rank {info.rank} is no member of that process group")
        return cls(chosen, devices)

    def share(self, specs: Mapping[str, LeafSpec]) -> Shares:
        """Deal out the reading of leaves that every member takes whole."""
        ordered = {name: specs[name] for name in sorted(specs)}
        shares = Shares(self._ranks, self._member, ordered)
        return Shares(self._ranks, self._member, ordered, shares.of(self._member))

    def prepare(self, shares: Shares, destinations: Mapping[str, Tensor]) -> None:
        """Have the memory that `run` takes: a rank that gets none says so before anyone is in a collective.

        Raises:
            RuntimeError: torch's, when there is no memory.
        """
        device = _device_of(self._group, self._devices)
        needed = [
            _end_of(pieces)
            for member in range(len(self._ranks))
            for pieces in _buffers(shares.of(member), destinations)
            if _direct(pieces, device) is None
        ]
        # The memory of an earlier try goes first.
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._buffer = torch.empty(max(needed, default=0), dtype=torch.uint8, device=device)

    def run(self, shares: Shares, destinations: Mapping[str, Tensor], *, timeout_s: float) -> None:
        """Send what this rank has read, and fill the rest of the tensors with what the others send.

        Called on the training thread of every member, once `prepare` and `check_groups` have passed on all of
        them. Once it returns, every stream of a device finds the bytes.
        """
        devices = self._devices
        device = _device_of(self._group, devices)
        for member, rank in enumerate(self._ranks):
            for pieces in _buffers(shares.of(member), destinations):
                self._send(pieces, rank, device=device, mine=member == self._member)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        wait_for_devices(devices, devices.of_all(destinations.values()), timeout_s)

    def _send(
        self, pieces: Sequence[_Piece], rank: int, *, device: torch.device, mine: bool
    ) -> None:
        direct = _direct(pieces, device)
        if direct is not None:
            dist.broadcast(direct, rank, group=self._group)
            return
        buffer = self._buffer[: _end_of(pieces)]
        if mine:
            _move(pieces, buffer, pack=True)
        dist.broadcast(buffer, rank, group=self._group)
        if not mine:
            _move(pieces, buffer, pack=False)


def check_groups(rows: Sequence[Json], *, path: Path) -> None:
    """Be sure that every member of every group is about to send and take the same leaves.

    Called on every rank with what `Shares.to_json` gave on each rank (None: no broadcast there), so all
    raise or none does.

    Raises:
        RestoreError: they are not; no collective has run.
    """
    for rank, row in enumerate(rows):
        if row is None:
            continue
        for other in row[0]:
            if rows[other] != row:
                raise RestoreError(
                    f"{path}: ranks {rank} and {other} are in one group of broadcast= and disagree about "
                    "its members or about which leaves they take whole: pass the same group, and states "
                    "of the same form, on all of its ranks, or broadcast=False",
                    path=path,
                )


def _buffers(
    shares: Mapping[str, tuple[int, int]], destinations: Mapping[str, Tensor]
) -> Iterator[list[_Piece]]:
    """What one member sends, cut and gathered into pieces of one collective each."""
    pieces: list[_Piece] = []
    at = 0
    for name, (start, left) in shares.items():
        while left:
            take = min(left, BUFFER_BYTES - at)
            pieces.append(_Piece(destinations[name].detach(), start, take, at))
            start, left, at = start + take, left - take, align_up(at + take, _ALIGN)
            if at >= BUFFER_BYTES:
                yield pieces
                pieces, at = [], 0
    if pieces:
        yield pieces


def _end_of(pieces: Sequence[_Piece]) -> int:
    return pieces[-1].at + pieces[-1].nbytes


def _direct(pieces: Sequence[_Piece], device: torch.device) -> Tensor | None:
    """What needs no buffer, since it can be sent, or taken, in place."""
    return _bytes_of(pieces[0], device) if len(pieces) == 1 else None


def _bytes_of(piece: _Piece, device: torch.device) -> Tensor | None:
    """A piece as bytes on the group's device, without a copy; None where that cannot be."""
    tensor, end = piece.tensor, piece.start + piece.nbytes
    if tensor.device.type != device.type:
        return None
    if is_flat(tensor):
        return torch.frombuffer(memory_of(tensor), dtype=torch.uint8)[piece.start : end]
    flat = None if tensor.is_cpu or tensor.device.index != device.index else flat_bytes(tensor)
    return None if flat is None else flat[piece.start : end]


def _move(pieces: Sequence[_Piece], buffer: Tensor, *, pack: bool) -> None:
    """Copy the pieces into the buffer, or out of it."""
    for piece in pieces:
        flat = _bytes_of(piece, piece.tensor.device)
        views = [(flat, 0)] if flat is not None else byte_range(*piece[:3])
        for view, offset in views:
            part = buffer[piece.at + offset : piece.at + offset + view.nbytes]
            words = part.view(view.dtype).view(view.shape)
            if pack:
                words.copy_(view)
            else:
                view.copy_(words)


def _device_of(group: dist.ProcessGroup, devices: Devices) -> torch.device:
    """Where the group's collectives run; the same on every member."""
    for pair in str(dist.get_backend_config(group)).split(","):
        kind, _, backend = pair.partition(":")
        if kind != "cpu" and backend not in _OF_THE_HOST:
            found = devices.current(kind)
            if found is not None:
                return found
    return torch.device("cpu")
