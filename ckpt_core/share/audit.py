"""Replicas are looked at over time: at every save all ranks hash the same small part of each leaf.

A rank copies and hashes only its own slice of a replicated leaf, so that leaves that are no replicas would
be stored as pieces of different tensors, which no checksum finds. Here every rank reads a little of what the
*others* store, and the hash goes into its vote. Which bytes that is: audit_plan.

A leaf is read when it is copied: an eager one inside `save`, a lazy one by the stager before training may
change it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ckpt_core.share.audit_plan import AuditPlan, Look, Turns
from ckpt_core.share.reference import LeafRow, difference, encode_rows
from ckpt_core.share.sharing import Share
from ckpt_core.snapshot import CopyStreams, EagerCopies, StageItem
from ckpt_core.state import Leaf, blocks, lies_at, memory_at
from ckpt_core.system.devices import NOTHING_QUEUED, Queued
from ckpt_core.units import align_up

_GRAIN = 64
_SCRATCH_BYTES = 1 << 20


class Auditor:
    """Has the audits of a Checkpointer made. One owner, one thread."""

    def __init__(self) -> None:
        self._compared: set[str] = set()
        self._turns = Turns()

    def turn(self, step: int) -> int:
        """Which turn it is of the leaves to look at. Called once for each save."""
        return self._turns.next(step)

    def audit(self, share: Share, leaves: Sequence[Leaf], turn: int) -> Audit:
        """What this rank is to see of its replicas at one save; reads nothing yet."""
        return Audit(share.audit, leaves, turn=turn, first=share.plan not in self._compared)

    def agreed(self, plans: Iterable[str]) -> None:
        """All ranks have found these structures equal. Called from any thread."""
        self._compared.update(plans)


class Audit:
    """What one rank sees of its replicas at one save.

    `read_eager` on the training thread, then `read_lazy` on the stager thread, then `marks` and `rows` on
    any. Keeps the live leaves until it has read them.

    Args:
        plan: what is looked at.
        leaves: of the flat state.
        turn: see `Turns`; the same for all audits of a save.
        first: the ranks have not compared this structure yet.
    """

    def __init__(self, plan: AuditPlan, leaves: Sequence[Leaf], *, turn: int, first: bool) -> None:
        self.plan = plan
        self._leaves: Sequence[Leaf] = leaves
        self._turn, self._first = turn, first
        self._seen: dict[int, tuple[int, Any]] = {}
        self._clones: list[tuple[Look, list[torch.Tensor]]] = []
        # Until `done`: copies into it may be under way after an error.
        self._scratch: _Scratch | None = None
        self._behind: Queued = NOTHING_QUEUED
        self._by_name: dict[str, tuple[Look, int]] | None = None

    def read_eager(self, streams: CopyStreams, copies: EagerCopies) -> None:
        """Look at the leaves that may change when `save` returns. Called on the training thread.

        Args:
            copies: makes those of leaves on a device, in the stream of training.

        Raises:
            StagingError: there is no room for them.
        """
        devices, scratch = streams.devices, _Scratch(streams, on_host=True)
        for looks, turn in self.plan.eager.due(self._turn, first=self._first):
            for look in looks:
                tensor = self._leaves[look.index].tensor
                if devices.of(tensor) is None:
                    self._read(look, tensor, turn, scratch)
                else:
                    self._clones.append((look, _clones_of(tensor, look.runs.at(turn), copies)))
        scratch.flush()
        # Order matters: behind the clones.
        live = (self._leaves[look.index].tensor for look, _ in self._due())
        clones = (clone for _, parts in self._clones for clone in parts)
        self._behind = devices.queued(devices.of_all(itertools.chain(live, clones)))

    @property
    def is_lazy(self) -> bool:
        """Whether `read_lazy` has something to read."""
        lazy = self.plan.lazy
        return bool(self._clones or lazy.always or lazy.turns)

    def names(self, among: Iterable[str] | None = None) -> list[str]:
        """Leaves that `read_lazy` is going to read; of those named, if names are given."""
        known = self._lazy_by_name()
        return list(known) if among is None else [name for name in among if name in known]

    def live(self, names: Iterable[str]) -> list[StageItem]:
        """Leaves that `names` gave, for `Snapshot.expect`."""
        known = self._lazy_by_name()
        return [(self._leaves[known[name][0].index].tensor, 0, 0) for name in names]

    def read_lazy(self, streams: CopyStreams, among: Iterable[str] | None = None) -> None:
        """Look at the other leaves, or at those named. Called by the stager before they may change.

        After an error the caller settles the streams before the leaves may change.
        """
        streams.follow(self._behind)
        scratch = self._scratch = _Scratch(streams, on_host=False)
        for look, parts in self._clones:
            digest = xxhash.xxh3_64()
            for part in parts:
                scratch.hash(digest, part, 0, part.nbytes)
            self._seen[look.row] = (look.group, digest)
        due = self._due() if among is None else [self._lazy_by_name()[name] for name in among]
        for look, turn in due:
            self._read(look, self._leaves[look.index].tensor, turn, scratch)
        scratch.flush()
        self._clones = []

    def done(self) -> None:
        """Nothing more will be read, nor copied: let go of the leaves."""
        self._leaves, self._clones, self._scratch = (), [], None

    def marks(self) -> dict[str, str]:
        """A hash of all that was read, for each group of ranks whose bytes are the same."""
        members: dict[int, list[int]] = {}
        for row in sorted(self._seen):
            group, digest = self._seen[row]
            members.setdefault(group, []).append(_number(digest))
        when = "first" if self._first else ""
        return {
            f"{self.plan.groups[group]}/{self._turn}{when}": xxhash.xxh3_64_hexdigest(
                array("Q", digests).tobytes()
            )
            for group, digests in members.items()
        }

    def rows(self) -> list[LeafRow]:
        """All leaves, with a digest where something was read."""
        rows = list(self.plan.rows)
        for row, (group, digest) in self._seen.items():
            rows[row] = rows[row]._replace(
                group=self.plan.groups[group], digest=f"{_number(digest):016x}"
            )
        return rows

    def _due(self) -> Iterator[tuple[Look, int]]:
        for looks, turn in self.plan.lazy.due(self._turn, first=self._first):
            for look in looks:
                yield look, turn

    def _lazy_by_name(self) -> dict[str, tuple[Look, int]]:
        if self._by_name is None:
            rows = self.plan.rows
            self._by_name = {rows[look.row].name: (look, turn) for look, turn in self._due()}
        return self._by_name

    def _read(self, look: Look, tensor: torch.Tensor, turn: int, scratch: _Scratch) -> None:
        runs = look.runs.at(turn)
        if len(runs) == 1 and scratch.devices.is_flat(tensor):
            begin, end = runs[0]
            memory = memory_at(lies_at(tensor) + begin, end - begin)
            self._seen[look.row] = (look.group, xxhash.xxh3_64_intdigest(memory))
            return
        digest = xxhash.xxh3_64()
        for begin, end in runs:
            scratch.hash(digest, tensor, begin, end)
        self._seen[look.row] = (look.group, digest)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rank has seen of everything that it stores together with others: its `Reference`."""

    audits: tuple[Audit, ...]

    def marks(self) -> dict[str, str]:
        """See `Reference.marks`."""
        return {
            f"{number}/{name}": mark
            for number, audit in enumerate(self.audits)
            for name, mark in audit.marks().items()
        }

    def encode(self) -> bytes:
        """See `Reference.encode`."""
        return encode_rows([row for audit in self.audits for row in audit.rows()])

    def difference(self, one: bytes, other: bytes, rank: int) -> str | None:
        """See `Reference.difference`."""
        return difference(one, other, rank)


class _Scratch:
    """Hashes bytes of leaves of any strides on any device; waits once for many copies."""

    def __init__(self, streams: CopyStreams, *, on_host: bool) -> None:
        self.devices = streams.devices
        self._streams = streams
        self._on_host = on_host
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._copied: list[tuple[Any, int, int]] = []

    def hash(self, digest: Any, tensor: torch.Tensor, begin: int, end: int) -> None:
        """Give row-major bytes of a leaf to `digest`, at the next `flush` if not at once."""
        if self.devices.is_flat(tensor):
            digest.update(memory_at(lies_at(tensor) + begin, end - begin))
            return
        if self._memory is None:
            self._memory = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
        while begin < end:
            if self._used == _SCRATCH_BYTES:
                self.flush()
            count = min(end - begin, _SCRATCH_BYTES - self._used)
            target = self._memory[self._used : self._used + count]
            self._streams.copy(tensor, begin, target, into=set())
            self._copied.append((digest, self._used, count))
            self._used = align_up(self._used + count, _GRAIN)
            begin += count

    def flush(self) -> None:
        """Hash what was copied."""
        if self._memory is not None:
            if not self._on_host:
                self._streams.settle()
            for digest, offset, count in self._copied:
                digest.update(memory_at(self._memory.data_ptr() + offset, count))
        self._used = 0
        self._copied.clear()


def _number(digest: Any) -> int:
    return digest if isinstance(digest, int) else int(digest.intdigest())


def _clones_of(
    tensor: torch.Tensor, runs: list[tuple[int, int]], copies: EagerCopies
) -> list[torch.Tensor]:
    item = tensor.element_size()
    return [
        copies.of(view)
        for begin, end in runs
        for view, _ in blocks(tensor, begin // item, (end - begin) // item, max(end - begin, 1))
    ]
