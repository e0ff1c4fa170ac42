"""Stage the still files of a save: hash what is live, and write only what is not there already.

What is compared is the whole file as it would be written: header, leaves, padding; piece by piece, with the
digests of what was written then. So a file is shared only if a write would have made the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ckpt_core.persist import HeldFile, ShardFile
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.shards import Shards
from ckpt_core.save.still_bytes import Comparison, LiveBytes, bytes_of
from ckpt_core.save.still_group import Loan, StillGroup
from ckpt_core.save.unchanged import NoSharing, lie
from ckpt_core.share import Arrangement, StillPart
from ckpt_core.snapshot import CopyStreams, LeafWatch, ShardImage, StageItem, StagingPool
from ckpt_core.state import FlatState

_HELPED_BYTES = 32 * 2**20
"""One writer is asked to help for so many bytes: a few milliseconds of hashing."""


@dataclass(frozen=True, slots=True)
class StillLeaves:
    """What is to lie in one still file of a save.

    Attributes:
        group: these leaves.
        part: where they lie in it.
        look: how some of them look.
        names, items: what is read for it, in file order.
        copied: some lie on devices, and nobody has declared them: they are compared as they come out of
            staging memory, by the writers.
    """

    group: StillGroup
    part: StillPart
    look: Mapping[str, bytes]
    names: tuple[str, ...]
    items: Sequence[StageItem]
    copied: bool


def still_leaves(
    flat: FlatState, arrangement: Arrangement, groups: Sequence[StillGroup], sharing: NoSharing
) -> tuple[StillLeaves, ...]:
    """Those of a state. Called on the training thread.

    Raises:
        ConfigError: a leaf looks otherwise of which the user says that it does not change.
    """
    looks = sharing.glance(flat, arrangement, groups)
    found = []
    for group, part, look in zip(groups, arrangement.stills, looks, strict=True):
        names, items = part.items(flat)
        copied = not group.declared and sharing.lie_on_devices(items)
        found.append(StillLeaves(group, part, look, names, items, copied))
    return tuple(found)


def open_still(
    shards: Shards,
    inflight: InFlight,
    pool: StagingPool,
    leaves: StillLeaves,
    watch: LeafWatch,
    sharing: NoSharing,
) -> StillFile | None:
    """The next file of a save; None if it is shared unread."""
    group, part, copied = leaves.group, leaves.part, leaves.copied
    sink = shards.open(inflight, part.layout.file_bytes, still=True)
    keeper = _Compared(group, part, sharing) if copied else group
    inflight.stills.append((keeper, sink.shard, leaves.look))
    loan = group.lend(sink.shard)
    if loan is not None and loan.trusted:
        sink.shard.share()
        return None
    if loan is not None and copied:
        sink.shard.compare()
        loan = None
    image = shards.image(sink, pool, (0, part.layout.file_bytes))
    return StillFile(
        *(group, part, sink.shard, image, leaves.names, leaves.items, watch, loan, copied)
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """A group whose leaves the writers have compared; it learns of those that have changed."""

    group: StillGroup
    part: StillPart
    sharing: NoSharing

    def committed(self, shard: ShardFile, step: Path, look: Mapping[str, bytes]) -> None:
        """See `StillGroup.committed`."""
        if shard.earlier is not None:
            self.sharing.changed(leaves_in(self.part, shard.others, shard.earlier))
        self.group.committed(shard, step, look)

    def forget(self) -> None:
        """See `StillGroup.forget`."""
        self.group.forget()


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
        loan: the file that it may be; None: there is none, or the writers compare it.
        copied: see `StillLeaves`.
    """

    group: StillGroup
    part: StillPart
    shard: ShardFile
    image: ShardImage
    names: tuple[str, ...]
    items: Sequence[StageItem]
    watch: LeafWatch
    loan: Loan | None
    copied: bool

    def write(self, leaves: Sequence[StageItem]) -> None:
        """Write the whole file, of copies that nobody else has."""
        self.image.header(self.part.layout.header)
        self.image.leaves(leaves)
        self.image.finish()

    def is_there(self, inflight: InFlight, pipeline: Pipeline, sharing: NoSharing) -> bool:
        """Whether its bytes are those of the earlier file, so that nothing need be written.

        Called by the stager, inside a reading of live leaves.

        Raises:
            ConfigError: a leaf has changed of which the user says that it does not.
        """
        loan, streams = self.loan, pipeline.streams
        if loan is None:
            return False
        live = LiveBytes(self.part.layout.header, self.items, streams)
        comparison = Comparison(live, loan.file, inflight.snapshot, deadline=inflight.deadline)
        for _ in range(_helpers(loan.file.nbytes, pipeline) if live.on_host else 0):
            pipeline.writers.submit(comparison.help)
        pieces = comparison.find()
        streams.settle()
        changed = leaves_in(self.part, pieces, loan.file)
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
                for run in bytes_of(tensor, 0, tensor.nbytes, streams):
                    if file.read(offset, len(run)) != run:
                        found[name] = None
                    offset += len(run)
        return list(found)


def leaves_in(part: StillPart, pieces: Iterable[int], file: HeldFile) -> list[str]:
    """Leaves with bytes in these pieces of a still file."""
    ends = list(accumulate(file.sizes))
    spans = [(ends[piece] - file.sizes[piece], ends[piece]) for piece in pieces]
    return [
        extent.name
        for extent in (place.extent for place in part.placed)
        if any(
            extent.offset < end and begin < extent.offset + extent.nbytes for begin, end in spans
        )
    ]


def _helpers(nbytes: int, pipeline: Pipeline) -> int:
    """Writers that help to hash so much: no more than there are processors beside the stager's."""
    others = len(os.sched_getaffinity(0)) - 1
    return min(pipeline.options.writers, others, nbytes // _HELPED_BYTES)
