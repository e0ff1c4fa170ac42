"""Start the snapshot of one checkpoint: what is copied inside `save`, and what the stager copies behind it.

    save():    flatten -> layout -> [header | eager leaves] on the training thread -> job for the stager
    stager:    lazy leaves in file order -> last chunk -> staged

From a device nothing is copied to the host on the training thread: eager leaves are cloned on their device,
in the stream of training, so that later work of that stream cannot reach the clone; the stager then copies
clones and lazy leaves on a stream of its own for each device, behind an event that training recorded there
inside `save`, after the clones. Training may go on once copies are queued: its stream waits for them, before
its next update. The stager waits only where many are under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from ckpt_core.errors import CkptError, StagingError
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.reading import Reading, look_at, stage_items
from ckpt_core.save.still_files import StillFile
from ckpt_core.save.unchanged import NoSharing
from ckpt_core.share import Arrangement, Audit, Whole, items_of
from ckpt_core.snapshot import (
    Buffer,
    CopyStreams,
    EagerCopies,
    Items,
    LeafWatch,
    ShardImage,
    StageItem,
    buffers_at,
    frozen,
)
from ckpt_core.state import FlatState
from ckpt_core.system.devices import NOTHING_QUEUED, Devices, Queued
from ckpt_core.types import Mode


@dataclass(frozen=True, slots=True)
class Flat:
    """Leaves by where they lie in host memory, in file order, without gaps there; see `ShardImage.flat`."""

    pointers: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    buffers: Sequence[Buffer] = ()


class Fronts:
    """Makes the fronts of saves: leaves that lie where they lay before are kept as buffers."""

    def __init__(self) -> None:
        self._last: Flat | None = None

    def flat(self, pointers: Sequence[int], front: Whole) -> Flat:
        """Of leaves at these addresses. Called on the training thread."""
        last = self._last
        if last is None or last.pointers != pointers or last.sizes is not front.sizes:
            made = Flat(pointers, front.offsets, front.sizes)
        else:
            made = last if last.buffers else replace(last, buffers=buffers_at(pointers, last.sizes))
        self._last = made
        return made


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

    front: Sequence[StageItem] | Flat
    frozen: Sequence[StageItem]
    lazy: Sequence[StageItem]
    names: tuple[str, ...]
    mode: Mode
    behind: Queued


def source_of(
    flat: FlatState,
    arrangement: Arrangement,
    stills: Sequence[Sequence[StageItem]],
    *,
    mode: Mode,
    copies: EagerCopies,
    fronts: Fronts,
) -> Source:
    """Split parts of leaves by when they are copied. Called on the training thread inside `save`.

    Args:
        stills: what is read for other files, behind the same events.
        mode: becomes HOST where it is DEVICE, and a device has no room for `copies`.

    Raises:
        StagingError: there is no room for copies of leaves that may change when `save` returns.
    """
    devices = copies.devices
    names, lazy = _lazy(flat, arrangement)
    ready = _ready(flat, arrangement, devices, fronts)
    front = () if ready else _front(flat, arrangement)
    columns = map(Items.of, (front, lazy, *stills))
    used = devices.of_all(chain.from_iterable(items.tensors for items in columns))
    if not used:
        return Source(ready or front, (), lazy, names, mode, NOTHING_QUEUED)
    clones = frozen(front, copies)
    mode = Mode.HOST if copies.fetched and mode is Mode.DEVICE else mode
    # Order matters: behind the clones, which the stager's streams read.
    return Source(ready or (), clones, lazy, names, mode, devices.queued(used))


def _ready(
    flat: FlatState, arrangement: Arrangement, devices: Devices, fronts: Fronts
) -> Flat | None:
    """The front, where all of it lies whole in host memory, and at known places."""
    front = arrangement.front
    if front is None or not flat.pointers or not all(map(flat.ready.__getitem__, front.indices)):
        return None
    if devices.any_of(map(flat.tensors.__getitem__, front.indices)):
        return None
    pointers = list(map(flat.pointers.__getitem__, front.indices))
    return fronts.flat(pointers, front)


def _front(flat: FlatState, arrangement: Arrangement) -> Sequence[StageItem]:
    if arrangement.front is not None:
        return arrangement.front.items(flat.tensors)
    named = items_of(flat.leaves, arrangement.placed[: arrangement.front_count])
    return [item for _, item in named]


def _lazy(flat: FlatState, arrangement: Arrangement) -> tuple[tuple[str, ...], Sequence[StageItem]]:
    if arrangement.lazy is not None:
        return arrangement.lazy_names, arrangement.lazy.items(flat.tensors)
    named = items_of(flat.leaves, arrangement.placed[arrangement.front_count :])
    return tuple([name for name, _ in named]), [item for _, item in named]


@dataclass(frozen=True, slots=True)
class StageJob:
    """Hands over what `save` has copied, and copies the rest of one source; runs on the stager thread.

    Attributes:
        no_room: called where DEVICE has become HOST for this save.
        sharing: looks at the leaves of the first file.
        offsets: where in that file which leaf is, for `sharing`.
        stills: the other files, those first that are `copied`.
        seen: all tensors of the state, which are let go of on the stager thread: for each of very many, that
            is a look at memory which is in no cache.
    """

    inflight: InFlight
    image: ShardImage
    source: Source
    audit: Audit
    watch: LeafWatch
    pipeline: Pipeline
    no_room: Callable[[], None]
    sharing: NoSharing
    offsets: Mapping[int, str]
    seen: Sequence[Sequence[Tensor]]
    stills: Sequence[StillFile] = ()

    def __post_init__(self) -> None:
        self.watch.begin(self.source.names, self.source.lazy)
        for still in self.stills:
            still.watch.begin(still.names, still.items)

    def copy_front(self) -> None:
        """What `save` copies itself."""
        front = self.source.front
        if isinstance(front, Flat):
            self.image.flat(front.pointers, front.offsets, front.sizes, front.buffers)
        else:
            self.image.leaves(front)

    def announce(self) -> None:
        """Note what training must wait for. Called before `run` is queued."""
        snapshot, source = self.inflight.snapshot, self.source
        behind = snapshot.expect_before_all() if self.audit.is_lazy else 0
        names, items = source.names, source.lazy
        if self.stills:
            names = (*names, *(name for still in self.stills for name in still.names))
            items = [*items, *(item for still in self.stills for item in still.items)]
        snapshot.expect(names, items, behind=behind)

    def run(self) -> None:
        """Copy; every error fails the checkpoint. Once this returns no live leaf is read any more."""
        streams, snapshot = self.pipeline.streams, self.inflight.snapshot
        file_bytes = self.inflight.file_bytes
        images = [self.image, *(still.image for still in self.stills)]
        with guarded(self.inflight, images, streams):
            self.image.let_go()
            if self.audit.is_lazy:
                look_at(snapshot, self.audit, streams)
                snapshot.arrived(1)
            self.audit.done()
            streams.follow(self.source.behind)
            # Clones count for no barrier: nobody else has them.
            self.image.leaves(self.source.frozen)
            if self.source.mode is not Mode.DEVICE or not self._stage_clones():
                self.pipeline.clones.drop()
                stage_items(snapshot, self.image, self.source.lazy, self._reading())
                if self.stills:
                    # It may have the only chunk that is free.
                    self.image.finish()
                self._stage_stills(self.stills)
            streams.settle()
            self.watch.raise_if_changed()
            snapshot.complete()
            self.image.finish()
        self.inflight.staging_ended()
        self.pipeline.touch_behind(self.image.pool, file_bytes)

    def _stage_clones(self) -> bool:
        """Clone on the devices; the live leaves are free as soon as that is done (LightCheck-G).

        False where there is no room.
        """
        snapshot, streams = self.inflight.snapshot, self.pipeline.streams
        stills = [still for still in self.stills if still.copied]
        files = [(self.source.lazy, self.watch), *((still.items, still.watch) for still in stills)]
        with self._reading().of(snapshot):
            clones = self.pipeline.clones.make([items for items, _ in files])
            if clones is not None:
                for items, watch in files:
                    watch.end(items)
        if clones is None:
            self.no_room()
            return False
        for _, watch in files:
            watch.raise_if_changed()
        snapshot.arrived(sum(len(items) for items, _ in files), streams.queued_now())
        self._stage_stills([still for still in self.stills if not still.copied])
        streams.settle()
        snapshot.complete()
        first, *others = clones
        self.image.leaves(first)
        for still, leaves in zip(stills, others, strict=True):
            # It may have the only chunk that is free.
            self.image.finish()
            still.write(leaves)
        return True

    def _stage_stills(self, stills: Sequence[StillFile]) -> None:
        """What is in these files: looked at, and written where it is not there already."""
        on_devices = bool(self.source.behind.events)
        for still in stills:
            stage_still(self.inflight, still, self.pipeline, self.sharing, on_devices=on_devices)

    def _reading(self) -> Reading:
        on_devices = bool(self.source.behind.events)
        return Reading(self.pipeline.streams, self.watch, on_devices, self._copied)

    def _copied(self, items: Sequence[StageItem]) -> None:
        self.sharing.look(items, self.offsets)
        self.watch.end(items)


def stage_still(
    inflight: InFlight,
    still: StillFile,
    pipeline: Pipeline,
    sharing: NoSharing,
    *,
    on_devices: bool,
) -> None:
    """Look at what is in a still file, and write it where it is not there already.

    Raises:
        StagingError: the checkpoint was given up meanwhile.
        ConfigError, BarrierError: a leaf has changed that must not.
    """
    snapshot, streams = inflight.snapshot, pipeline.streams
    reading = Reading(streams, still.watch, on_devices)
    with reading.of(snapshot):
        is_there = still.is_there(inflight, pipeline, sharing)
    if is_there:
        still.shard.share()
        snapshot.arrived(len(still.names))
    else:
        still.image.header(still.part.layout.header)
        stage_items(snapshot, still.image, still.items, reading)
        still.image.finish()
        streams.settle()
    still.watch.raise_if_changed()


@contextlib.contextmanager
def guarded(
    inflight: InFlight, images: Sequence[ShardImage], streams: CopyStreams
) -> Iterator[None]:
    """Staging work whose errors fail the checkpoint and give its chunks back."""
    try:
        yield
    except BaseException as exc:
        inflight.fail(_ours(exc))
        for image in images:
            image.abandon()
        # Order matters: clones go with the job, and abandoned images have put their streams to use again.
        streams.settle_after_error()


def _ours(error: BaseException) -> BaseException:
    """What torch says of a copy that cannot be made, such as for want of a device's memory, as our error."""
    if not isinstance(error, RuntimeError | MemoryError) or isinstance(error, CkptError):
        return error
    made = StagingError(f"a copy failed: {error}. Committed steps and training are untouched")
    made.__cause__ = error
    return made
