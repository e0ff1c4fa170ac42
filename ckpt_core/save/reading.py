"""How live leaves are read behind `save`: in batches, after each of which training may go on with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_core.errors import BarrierError, StagingError
from ckpt_core.share import Audit
from ckpt_core.snapshot import CopyStreams, LeafWatch, ShardImage, Snapshot, StageItem, batches

_BATCH = (64 * 1024, 256)
"""Bytes and leaves after which training is told: it may wait for the next ones."""

_DEVICE_BATCH = (64 * 2**20, 4096)
"""The same where copies are only queued, behind an event for each batch."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How live leaves are read.

    Attributes:
        watch: has seen them as they were handed over.
        on_devices: most of them lie there.
        copied: told of leaves whose copies are made, or queued; None: `watch` is.
    """

    streams: CopyStreams
    watch: LeafWatch
    on_devices: bool
    copied: Callable[[Sequence[StageItem]], None] | None = None

    def of(self, snapshot: Snapshot) -> _Entered:
        """Copies of live leaves are made or queued; after an error nobody reads them.

        Raises:
            StagingError: the checkpoint was given up meanwhile.
        """
        if not snapshot.enter_copy():
            raise StagingError(f"step {snapshot.step} was given up while it was being staged")
        return _Entered(snapshot, self.streams, self.watch)


class _Entered:
    """Copies behind `enter_copy`; after an error none is under way any more."""

    # Not made of a generator, which takes several times as long: there is one for each larger leaf.

    def __init__(
        self, snapshot: Snapshot, streams: CopyStreams, watch: LeafWatch | None = None
    ) -> None:
        self._snapshot, self._streams, self._watch = snapshot, streams, watch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._streams.settle()
        finally:
            # Order matters: training may change these leaves as soon as the snapshot knows.
            self._snapshot.leave_copy()
        if self._watch is not None and isinstance(error, BarrierError):
            self._watch.raise_if_lost()


def look_at(
    snapshot: Snapshot, audit: Audit, streams: CopyStreams, among: Sequence[str] | None = None
) -> None:
    """Read what is to be compared with other ranks, unless the checkpoint was given up meanwhile."""
    if not snapshot.enter_copy():
        return
    with _Entered(snapshot, streams):
        audit.read_lazy(streams, among)
        streams.settle()


def stage_items(
    snapshot: Snapshot, image: ShardImage, items: Sequence[StageItem], reading: Reading
) -> None:
    """Copy items in batches, telling the snapshot after each.

    Raises:
        StagingError: the checkpoint was given up meanwhile.
    """
    most = _DEVICE_BATCH if reading.on_devices else _BATCH
    copied = reading.copied or reading.watch.end
    for batch in batches(items, *most):
        with reading.of(snapshot):
            image.leaves(batch)
            copied(batch)
        snapshot.arrived(len(batch), reading.streams.queued_now())
