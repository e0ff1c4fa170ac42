"""The files of a save: each is registered by name, made late, and fed piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_core.layout import shard_name
from ckpt_core.persist import (
    SUM_BYTES,
    FilePlace,
    HeldBack,
    ShardFile,
    ShardRequest,
    WriteJob,
    WriterPool,
)
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.snapshot import ImageSpec, Piece, ShardImage, StagingPool
from ckpt_core.store import GuestStore, StepStore, file_path
from ckpt_core.system.files import Files
from ckpt_core.types import DirectIO, RankInfo
from ckpt_core.units import ALIGN_BYTES, align_up

Show = Callable[[int, memoryview], None]


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


class Shards:
    """Registers the files of checkpoints. Nothing is opened here: that is for the first who writes."""

    def __init__(
        self, pipeline: Pipeline, store: StepStore | GuestStore, info: RankInfo, *, files: Files
    ) -> None:
        self._pipeline = pipeline
        self._store = store
        self._rank = info.rank
        # Restoring with another number of ranks takes parts of files.
        self._sum_bytes = SUM_BYTES if info.world_size > 1 else None
        self._files = files
        self._kept = pipeline.kept
        self._in_huge_pages = False
        self.may_map = True
        """Whether a full disk is told before a byte of a mapped file is written, and not by a SIGBUS."""

    def look(self) -> None:
        """Ask the root now what saves go by, so that none asks it on training's thread. Called at open."""
        self._in_huge_pages = self._files.in_huge_pages(self._store.root)
        self._kept.keeps(self._store.root)
        self.may_map = self._files.reserves(self._store.root)

    def is_mapped_for_nothing(self, nbytes: int) -> bool:
        """Whether the next file of so many bytes is memory that takes no faults, or hardly any."""
        if self._in_huge_pages or not self._kept.has_any:
            return self._in_huge_pages
        return self._kept.is_warm(self._store.next_slot(nbytes), nbytes)

    def open(
        self,
        inflight: InFlight,
        nbytes: int,
        *,
        mapped: bool = False,
        still: bool = False,
        show: Show | None = None,
    ) -> ShardSink:
        """The next shard file of a checkpoint; a still one may be shared by steps.

        Args:
            show: see `ShardRequest.show`.
        """
        name = shard_name(self._rank, len(inflight.shards))
        request = self._request(
            inflight, name, nbytes, partial(self._place, inflight, name, nbytes)
        )
        shared_at = partial(self._shared_place, inflight, name) if still else None
        request = replace(
            request, mapped=mapped, sum_bytes=self._sum_bytes, shared_at=shared_at, show=show
        )
        return self._sink(inflight, request)

    def open_named(
        self, inflight: InFlight, name: str, nbytes: int, *, like: tuple[bytes, ...] | None = None
    ) -> ShardSink:
        """A file that has a name of its own and any length; see `ShardRequest.like`."""
        padded, place = align_up(nbytes, ALIGN_BYTES), partial(self._named_place, inflight, name)
        request = self._request(inflight, name, padded, place)
        shared_at = None if like is None else partial(self._named_path, inflight, name)
        request = replace(request, exact_bytes=nbytes, shared_at=shared_at, like=like)
        return self._sink(inflight, request)

    def image(
        self,
        sink: ShardSink,
        pool: StagingPool,
        layout_bytes: tuple[int, int],
        *,
        hold: bool = False,
    ) -> ShardImage:
        """The image of a file of (front_bytes, file_bytes), fed to `sink`."""
        front_bytes, file_bytes = layout_bytes
        spec = ImageSpec(
            file_bytes=file_bytes,
            front_bytes=front_bytes,
            hold_bytes=front_bytes if hold else 0,
            mapped=sink.shard.request.mapped,
            deadline=sink.inflight.deadline,
            cancelled=sink.inflight.failed,
        )
        # The pool must not be replaced by a larger one while this image may still ask it for chunks.
        sink.inflight.lease(pool)
        image = ShardImage(pool, sink, spec, self._pipeline.streams)
        sink.inflight.images.append(image)
        return image

    # -- inside ----------------------------------------------------------------------------------

    def _request(
        self, inflight: InFlight, name: str, nbytes: int, place: Callable[[], FilePlace]
    ) -> ShardRequest:
        options = self._pipeline.options
        return ShardRequest(
            name=name,
            nbytes=nbytes,
            place=place,
            direct_io=DirectIO(options.direct_io),
            checksum=options.checksum,
            step=inflight.step,
        )

    def _sink(self, inflight: InFlight, request: ShardRequest) -> ShardSink:
        recycled = request.shared_at is None and request.takes_slot
        kept = self._kept if recycled and self._kept.keeps(self._store.root) else None
        shard = ShardFile(request, files=self._files, kept=kept)
        writers = self._writers_for(inflight)
        inflight.shards.append(shard)
        return ShardSink(inflight, shard, writers)

    def _writers_for(self, inflight: InFlight) -> WriterPool | HeldBack:
        writers = self._pipeline.writers
        if self._pipeline.options.pipelined:
            return writers
        held = HeldBack(writers)
        inflight.until_staged(held.let_go)
        return held

    # Called by the first who writes, on a background thread.

    def _place(self, inflight: InFlight, name: str, nbytes: int) -> FilePlace:
        attempt = inflight.directory()
        recycled = self._store.take_slot(attempt, name, nbytes)
        return FilePlace(attempt.path / name, recycled)

    def _shared_place(self, inflight: InFlight, name: str) -> Path:
        return inflight.directory().path / name

    def _named_place(self, inflight: InFlight, name: str) -> FilePlace:
        return FilePlace(self._named_path(inflight, name), recycled=False)

    def _named_path(self, inflight: InFlight, name: str) -> Path:
        return file_path(self._files, inflight.directory(), name)
