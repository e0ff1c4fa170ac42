"""Stage the still files of a save: hash what is live, and write only what is not there already.

What is compared is the whole file as it would be written: header, leaves, padding; piece by piece, with the
digests of what was written then. So a file is shared only if a write would have made the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ckpt_core.persist import HeldFile, ShardFile
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.shards import Shards
from ckpt_core.save.still_group import Loan, StillGroup
from ckpt_core.save.unchanged import NoSharing, lie
from ckpt_core.share import Arrangement, StillPart
from ckpt_core.snapshot import CopyStreams, LeafWatch, ShardImage, StageItem, StagingPool
from ckpt_core.state import FlatState, memory_at, memory_of

_SCRATCH_BYTES = 8 * 2**20
_NO_BYTES = bytes(4096)


@dataclass(frozen=True, slots=True)
class StillLeaves:
    """What is to lie in one still file of a save.

    Attributes:
        group: these leaves.
        part: where they lie in it.
        look: how some of them look.
        names, items: what is read for it, in file order.
    """

    group: StillGroup
    part: StillPart
    look: Mapping[str, bytes]
    names: tuple[str, ...]
    items: Sequence[StageItem]


def still_leaves(
    flat: FlatState, arrangement: Arrangement, groups: Sequence[StillGroup], sharing: NoSharing
) -> tuple[StillLeaves, ...]:
    """Those of a state. Called on the training thread.

    Raises:
        ConfigError: a leaf looks otherwise of which the user says that it does not change.
    """
    looks = sharing.glance(flat, arrangement, groups)
    rows = zip(groups, arrangement.stills, looks, strict=True)
    return tuple([StillLeaves(group, part, look, *part.items(flat)) for group, part, look in rows])


def open_still(
    shards: Shards, inflight: InFlight, pool: StagingPool, leaves: StillLeaves, watch: LeafWatch
) -> StillFile | None:
    """The next file of a save; None if it is shared unread."""
    group, part = leaves.group, leaves.part
    sink = shards.open(inflight, part.layout.file_bytes, still=True)
    inflight.stills.append((group, sink.shard, leaves.look))
    loan = group.lend(sink.shard)
    if loan is not None and loan.trusted:
        sink.shard.share()
        return None
    image = shards.image(sink, pool, (0, part.layout.file_bytes))
    return StillFile(group, part, sink.shard, image, leaves.names, leaves.items, watch, loan)


@dataclass(frozen=True, slots=True)
class StillFile:
    """A still file of one save.

    Attributes:
        group: its leaves.
        part: where they lie in it.
        shard: the file.
        image: its bytes, where they are written.
        names, items: what is read for it, in file order.
        watch: finds what changes too early.
        loan: the file that it may be; None: there is none.
    """

    group: StillGroup
    part: StillPart
    shard: ShardFile
    image: ShardImage
    names: tuple[str, ...]
    items: Sequence[StageItem]
    watch: LeafWatch
    loan: Loan | None

    def is_there(self, streams: CopyStreams, sharing: NoSharing) -> bool:
        """Whether its bytes are those of the earlier file, so that nothing need be written.

        Called by the stager, inside a reading of live leaves.

        Raises:
            ConfigError: a leaf has changed of which the user says that it does not.
        """
        loan = self.loan
        if loan is None:
            return False
        runs = _runs(self.part, self.items, streams)
        pieces = differing(runs, loan.file)
        streams.settle()
        changed = self._leaves_in(pieces, loan.file)
        if changed and self.group.declared:
            # The next save writes what there is.
            self.group.forget()
            raise lie(self._surely(changed, loan.file, streams) or changed)
        if changed:
            sharing.changed(changed)
        self.watch.end(self.items if not pieces and not loan.renew else ())
        return not pieces and not loan.renew

    def _surely(self, suspects: Sequence[str], file: HeldFile, streams: CopyStreams) -> list[str]:
        """Those of these leaves whose bytes are not as in the file."""
        found: dict[str, None] = {}
        for name, (tensor, offset, _) in zip(self.names, self.items, strict=True):
            if name in suspects:
                for run in _runs_of(tensor, streams):
                    if file.read(offset, len(run)) != run:
                        found[name] = None
                    offset += len(run)
        return list(found)

    def _leaves_in(self, pieces: Iterable[int], file: HeldFile) -> list[str]:
        """Leaves with bytes in these pieces."""
        ends: list[int] = []
        for size in file.sizes:
            ends.append(size + (ends[-1] if ends else 0))
        spans = [(ends[piece] - file.sizes[piece], ends[piece]) for piece in pieces]
        return [
            extent.name
            for extent in (place.extent for place in self.part.placed)
            if any(
                extent.offset < end and begin < extent.offset + extent.nbytes
                for begin, end in spans
            )
        ]


def differing(runs: Iterable[memoryview], file: HeldFile) -> list[int]:
    """Numbers of the pieces of a file that these bytes have otherwise."""
    found: list[int] = []
    digest, piece, left = xxhash.xxh3_128(), 0, file.sizes[0]
    for run in runs:
        while run:
            part, run = run[:left], run[left:]
            digest.update(part)
            left -= len(part)
            if left == 0:
                if digest.digest() != file.digests[piece]:
                    found.append(piece)
                piece += 1
                digest.reset()
                left = file.sizes[piece] if piece < len(file.sizes) else -1
    assert piece == len(file.sizes), "another length"
    return found


def _runs(
    part: StillPart, items: Sequence[StageItem], streams: CopyStreams
) -> Iterator[memoryview]:
    """The bytes of the file as it would be written, in order; each is read before the next."""
    yield memoryview(part.layout.header)
    cursor = len(part.layout.header)
    for tensor, offset, nbytes in items:
        if nbytes == 0:
            continue
        yield from _zeros(offset - cursor)
        cursor = offset + nbytes
        yield from _runs_of(tensor, streams)
    yield from _zeros(part.layout.file_bytes - cursor)


def _runs_of(tensor: torch.Tensor, streams: CopyStreams) -> Iterator[memoryview]:
    """The row-major bytes of a leaf that has some."""
    if streams.devices.is_flat(tensor):
        yield memory_at(tensor.data_ptr(), tensor.nbytes)
        return
    # By whole elements: leaves of a device, and strided ones.
    most = _SCRATCH_BYTES // tensor.element_size() * tensor.element_size()
    scratch = torch.empty(min(most, tensor.nbytes), dtype=torch.uint8, device="cpu")
    for start in range(0, tensor.nbytes, most):
        target = scratch[: min(most, tensor.nbytes - start)]
        streams.copy(tensor, start, target, into=set())
        streams.settle()
        yield memory_of(target)


def _zeros(count: int) -> Iterator[memoryview]:
    while count > 0:
        run = memoryview(_NO_BYTES)[:count]
        yield run
        count -= len(run)
