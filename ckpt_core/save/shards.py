"""Where the pieces of a shard file go."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.persist import HeldBack, ShardFile, WriteJob, WriterPool
from ckpt_core.save.in_flight import InFlight
from ckpt_core.snapshot import Piece


@dataclass(frozen=True, slots=True)
class ShardSink:
    """Takes the pieces of one shard image to the writers (the ChunkSink of snapshot/)."""

    inflight: InFlight
    shard: ShardFile
    writers: WriterPool | HeldBack

    def submit(self, piece: Piece) -> None:
        """Queue a piece for writing."""
        self.inflight.piece_submitted()
        self.writers.submit(
            WriteJob(self.shard, piece, self.inflight.failed, self.inflight.piece_done)
        )

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Memory of the file itself."""
        return self.shard.window(offset, nbytes)


def make_sink(inflight: InFlight, shard: ShardFile, writers: WriterPool | HeldBack) -> ShardSink:
    """Register a shard file with its checkpoint; returns where its pieces go."""
    inflight.shards.append(shard)
    return ShardSink(inflight, shard, writers)
