"""Start the snapshot of one checkpoint: what is copied inside `save`, and what the stager copies behind it.

    save():    flatten -> layout -> [header | eager leaves] on the training thread -> job for the stager
    stager:    lazy leaves in file order -> last chunk -> staged

From a device nothing is copied to the host on the training thread: eager leaves are cloned on their device,
in the stream of training, so that later work of that stream cannot reach the clone; the stager then copies
clones and lazy leaves on a stream of its own for each device, behind an event that training recorded there
inside `save`, after the clones.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt_core.errors import CkptError, StagingError
from ckpt_core.save.in_flight import InFlight
from ckpt_core.share import Arrangement, Audit, items_of
from ckpt_core.snapshot import CopyStreams, LeafWatch, ShardImage, Snapshot, StageItem
from ckpt_core.state import Leaf
from ckpt_core.system.devices import NOTHING_QUEUED, Devices, Queued
from ckpt_core.types import Mode

_BATCH_BYTES = 64 * 1024
_BATCH_LEAVES = 256


@dataclass(frozen=True, slots=True)
class Source:
    """Where and how the leaves of one shard file are read.

    Attributes:
        front: leaves copied inside `save`, in file order.
        frozen: clones of leaves, made inside `save` on the device; copied by the stager before `lazy`.
        lazy: leaves copied by the stager, in file order.
        names: of the leaf of each of `lazy`.
        mode: HOST, DEVICE or DIRECT; never AUTO.
        behind: what the stager's copies wait for: everything that made the leaves and the clones.
    """

    front: Sequence[StageItem]
    frozen: Sequence[StageItem]
    lazy: Sequence[StageItem]
    names: tuple[str, ...]
    mode: Mode
    behind: Queued


def source_of(
    leaves: Sequence[Leaf], arrangement: Arrangement, *, mode: Mode, devices: Devices
) -> Source:
    """Split parts of leaves by when they are copied. Called on the training thread inside `save`."""
    count = arrangement.front_count
    front = [item for _, item in items_of(leaves, arrangement.placed[:count])]
    named = items_of(leaves, arrangement.placed[count:])
    names, lazy = tuple([name for name, _ in named]), [item for _, item in named]
    used = devices.of_all(tensor for tensor, _, _ in (*front, *lazy))
    if not used:
        return Source(front, (), lazy, names, mode, NOTHING_QUEUED)
    frozen = [(devices.clone(tensor), offset, size) for tensor, offset, size in front]
    # Order matters: behind the clones, which the stager's streams read.
    return Source((), frozen, lazy, names, mode, devices.queued(used))


@dataclass(frozen=True, slots=True)
class StageJob:
    """Hands over what `save` has copied, and copies the rest of one source; runs on the stager thread."""

    inflight: InFlight
    image: ShardImage
    source: Source
    audit: Audit
    watch: LeafWatch
    streams: CopyStreams

    def __post_init__(self) -> None:
        self.watch.begin(self.source.names, self.source.lazy)

    def announce(self) -> None:
        """Note what training must wait for. Called before `run` is queued."""
        snapshot, source = self.inflight.snapshot, self.source
        behind = snapshot.expect_before_all() if self.audit.is_lazy else 0
        snapshot.expect(source.names, source.lazy, behind=behind)

    def run(self) -> None:
        """Copy; every error fails the checkpoint. Once this returns no live leaf is read any more."""
        with guarded(self.inflight, [self.image]):
            self.image.let_go()
            if self.audit.is_lazy:
                look_at(self.inflight.snapshot, self.audit, self.streams)
                self.inflight.snapshot.arrived(1)
            self.audit.done()
            self.streams.follow(self.source.behind)
            # Clones count for no barrier: nobody else has them.
            self.image.leaves(self.source.frozen)
            items = self._cloned() if self.source.mode is Mode.DEVICE else self.source.lazy
            stage_items(self.inflight.snapshot, self.image, items, settle=self._settle)
            self.streams.settle()
            self.watch.raise_if_changed()
            self.inflight.snapshot.complete()
            self.image.finish()
        self.inflight.staging_ended()

    def _cloned(self) -> Sequence[StageItem]:
        """Clones on the devices; the live leaves are free as soon as they are made (LightCheck-G)."""
        lazy, snapshot = self.source.lazy, self.inflight.snapshot
        if not self._has_room():
            return lazy
        if not snapshot.enter_copy():
            raise StagingError(f"step {snapshot.step} was given up while it was being staged")
        with _reading(snapshot, lazy, self._settle):
            clones = tuple([(self.streams.clone(x), at, size) for x, at, size in lazy])
        self.watch.raise_if_changed()
        snapshot.arrived(len(self.source.names))
        snapshot.complete()
        return clones

    def _settle(self, items: Sequence[StageItem]) -> None:
        self.streams.settle()
        self.watch.end(items)

    def _has_room(self) -> bool:
        """Whether all leaves are on devices, and each has room for clones of its own."""
        devices, need = self.streams.devices, Counter[torch.device | None]()
        for tensor, _, size in self.source.lazy:
            need[devices.of(tensor)] += size
        return None not in need and all(devices.has_room(need[device], device) for device in need)


def look_at(
    snapshot: Snapshot, audit: Audit, streams: CopyStreams, among: Sequence[str] | None = None
) -> None:
    """Read what is to be compared with other ranks, unless the checkpoint was given up meanwhile."""
    if not snapshot.enter_copy():
        return
    with _reading(snapshot, (), lambda _: streams.settle()):
        audit.read_lazy(streams, among)


def stage_items(
    snapshot: Snapshot,
    image: ShardImage,
    items: Sequence[StageItem],
    *,
    settle: Callable[[Sequence[StageItem]], None],
) -> None:
    """Copy items in batches, telling the snapshot after each.

    Args:
        settle: called after each batch, also after an error; waits for copies of a device that are still
            under way.

    Raises:
        StagingError: the checkpoint was given up meanwhile.
    """
    for batch in _batches(items):
        if not snapshot.enter_copy():
            if snapshot.staged.exception() is None:
                image.leaves(batch)  # clones: the barrier is open already
                continue
            raise StagingError(f"step {snapshot.step} was given up while it was being staged")
        with _reading(snapshot, batch, settle):
            image.leaves(batch)
        snapshot.arrived(len(batch))


@contextlib.contextmanager
def _reading(
    snapshot: Snapshot, items: Sequence[StageItem], settle: Callable[[Sequence[StageItem]], None]
) -> Iterator[None]:
    """Copies of live leaves, after `enter_copy`; once it ends, also with an error, nobody reads them."""
    try:
        try:
            yield
        finally:
            # Order matters: training may change these leaves as soon as the snapshot knows.
            settle(items)
    finally:
        snapshot.leave_copy()


def _batches(items: Sequence[StageItem]) -> Iterator[Sequence[StageItem]]:
    start, size = 0, 0
    for index, (_, _, nbytes) in enumerate(items):
        size += nbytes
        if size >= _BATCH_BYTES or index + 1 - start >= _BATCH_LEAVES:
            yield items[start : index + 1]
            start, size = index + 1, 0
    if start < len(items):
        yield items[start:]


@contextlib.contextmanager
def guarded(inflight: InFlight, images: Sequence[ShardImage]) -> Iterator[None]:
    """Staging work whose errors fail the checkpoint and give its chunks back."""
    try:
        yield
    except BaseException as exc:
        inflight.fail(_ours(exc))
        for image in images:
            image.abandon()


def _ours(error: BaseException) -> BaseException:
    """What torch says of a copy that cannot be made, such as for want of a device's memory, as our error."""
    if not isinstance(error, RuntimeError) or isinstance(error, CkptError):
        return error
    made = StagingError(f"a copy failed: {error}. Committed steps and training are untouched")
    made.__cause__ = error
    return made
