"""From a state to staged and written shard files: joins layout, staging memory, stager and writers.

Made by the Checkpointer; called on the training thread. `plan` finds everything that can be wrong with the
input before a checkpoint is started; `start` copies what must be copied now and queues the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_core.errors import ConfigError
from ckpt_core.layout import LayoutBuilder, ShardLayout, shard_name
from ckpt_core.options import Options
from ckpt_core.persist import SUM_BYTES, HeldBack, Place, ShardFile, ShardRequest, WriterPool
from ckpt_core.save.in_flight import Contents, InFlight
from ckpt_core.save.journal import Journal
from ckpt_core.save.shards import ShardSink, make_sink
from ckpt_core.save.staging import StageJob, open_image, source_of
from ckpt_core.share import (
    Arrangement,
    Arranger,
    Audit,
    Auditor,
    AuditPlan,
    Evidence,
    Placed,
    Scope,
    Share,
    Sharer,
    TextReference,
)
from ckpt_core.snapshot import (
    CopyStreams,
    LeafWatch,
    PoolDemand,
    Sampler,
    ShardImage,
    Stager,
    StagingMemory,
    StagingPool,
)
from ckpt_core.state import FlatState, Leaf, Skeleton, SpecMemo, flatten
from ckpt_core.store import GuestStore, StepStore, file_path
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files
from ckpt_core.types import DirectIO, LeafSpec, Mode, RankInfo
from ckpt_core.units import ALIGN_BYTES, align_up, parse_bytes

_NAMED_CHUNKS = 128
"""How many chunks the first save of named files is taken for, since nobody has said yet."""


@dataclass(frozen=True)
class SavePlan:
    """A state that can be saved: its leaves, where they go, and the memory for it."""

    flat: FlatState
    arrangement: Arrangement
    pool: StagingPool


@dataclass(frozen=True)
class LayerwisePlan:
    """Tensors that will be staged one by one.

    Attributes:
        flat: the tensors as a flat state.
        leaf_of: name that the caller gave -> leaf (two names of one tensor share a leaf).
        share: what this rank stores of them.
        audit: what it looks at of what others store.
        builder: places each part when its leaf is staged.
        pool: the memory for it.
    """

    flat: FlatState
    leaf_of: Mapping[str, Leaf]
    share: Share
    audit: AuditPlan
    builder: LayoutBuilder
    pool: StagingPool


class Pipeline:
    """Owns the stager thread, the writer threads and the staging memory."""

    def __init__(
        self,
        options: Options,
        store: StepStore | GuestStore,
        *,
        info: RankInfo,
        files: Files,
        devices: Devices,
    ) -> None:
        self.auditor = Auditor()
        self.options = self._options = options
        self._store = store
        self._rank, self._several = info.rank, info.world_size > 1
        self._layerwise_sharer, self._rest_sharer = Sharer(info), Sharer(info)
        self._files = files
        self.eager_leaf_bytes = parse_bytes(options.eager_leaf_bytes, field="eager_leaf_bytes")
        self._named_bytes = 0
        self._rest_bytes = 0
        self.devices = devices
        self.streams = CopyStreams(devices)
        self._memory = StagingMemory(options, devices, neighbours=info.neighbours)
        self._stager = Stager()
        self._writers = WriterPool(options.writers)
        self._arranger = Arranger(Sharer(info))
        self._memo = SpecMemo()
        self._sampler = Sampler(self.devices)
        # AUTO leaves the choice to the leaves; a policy that has measured may set another.
        self.mode = self.mode_used = Mode(options.mode)
        self.journal = Journal()

    def start_threads(self) -> None:
        """Start the threads. Called once, when the Checkpointer is made.

        Raises:
            PersistError: the system gives no more threads.
        """
        self._stager.start()
        self._writers.start()

    @property
    def staging_peak_bytes(self) -> int:
        """Most staging memory that was in use at one time."""
        return self._memory.most_held_bytes

    def watch_for(self, inflight: InFlight) -> LeafWatch:
        """Finds what changes before it has been copied, in one file of a checkpoint."""
        sampler = None if self._options.debug_barrier else self._sampler
        return LeafWatch(inflight.step, sampler, devices=self.devices)

    def plan(self, state: Any, scope: Scope) -> SavePlan:
        """Flatten and lay out a state, and have memory for it.

        Raises:
            ConfigError: the state cannot be saved.
        """
        flat = flatten(state, eager_leaf_bytes=self.eager_leaf_bytes, memo=self._memo)
        arrangement = self._arranger.arrange(flat, scope)
        layout = arrangement.layout
        demand = self._memory.demand_of_save(
            layout.file_bytes, layout.front_bytes, mapped=self.mode is Mode.DIRECT
        )
        pool = self._pool(flat.leaves, demand)
        return SavePlan(flat, arrangement, pool)

    def prepare(self, state: Any, scope: Scope) -> None:
        """Allocate and touch the memory for a state."""
        self.plan(state, scope).pool.touch()

    def start(self, inflight: InFlight, plan: SavePlan) -> None:
        """Copy the front on this thread and queue the rest; the checkpoint then goes on by itself.

        Invariant: nothing leaves for the writers before the stager has the job, so that until then all
        that an interrupt leaves behind is in `inflight` and its images.
        """
        arrangement, layout = plan.arrangement, plan.arrangement.layout
        turn = self.auditor.turn(inflight.step)
        audit = self.auditor.audit(arrangement.share, arrangement.audit, plan.flat.leaves, turn)
        inflight.contents = self.contents(
            arrangement.placed, plan.flat.skeleton, [arrangement.share], [audit]
        )
        audit.read_eager(self.streams)
        mode = self.mode_used = self._resolve_mode(plan.flat.leaves)
        source = source_of(plan.flat.leaves, arrangement, mode=mode, devices=self.devices)
        sink = self.open_shard(inflight, layout.file_bytes, mapped=mode is Mode.DIRECT)
        sizes = (layout.front_bytes, layout.file_bytes)
        image = open_image(
            sink, plan.pool, sizes, self.streams, hold=True, mapped=mode is Mode.DIRECT
        )
        watch, streams = self.watch_for(inflight), self.streams
        job = StageJob(inflight, image, source, audit, watch=watch, streams=streams)
        inflight.snapshot.name_leaves(lambda name: name if name in arrangement.names else None)
        job.announce()
        image.header(layout.header)
        image.leaves(source.front)
        self._stager.submit(job.run)
        # The stager does so too, but may be busy with older checkpoints.
        self._writers.submit(image.let_go)

    def plan_layerwise(self, tensors: Mapping[str, torch.Tensor]) -> LayerwisePlan:
        """Lay out tensors whose order is not known yet.

        Raises:
            ConfigError: a name is no text, a value no tensor, or two tensors overlap in memory.
        """
        untyped: Mapping[object, object] = dict(tensors.items())
        for name, tensor in untyped.items():
            if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
                raise ConfigError(
                    f"tensors[{name!r}] is a {type(tensor).__name__}: begin() takes tensors by name"
                )
        flat = flatten(dict(tensors), eager_leaf_bytes=0)
        if flat.placements:
            raise ConfigError(
                f"tensors[{min(flat.placements)!r}] is a DTensor: begin() takes plain tensors; give "
                f"distributed ones to seal()"
            )
        leaf_of = _leaves_by_name(tensors, flat)
        share = self._layerwise_sharer.share(flat, Scope())
        builder = LayoutBuilder([part.stored for part in share.parts])
        pool = self._pool(flat.leaves, self._demand_of_layers(builder, self._rest_bytes))
        audit = self.auditor.plan(share, flat.leaves)
        return LayerwisePlan(flat, leaf_of, share, audit, builder, pool)

    def contents(
        self,
        placed: tuple[Placed, ...],
        skeleton: Skeleton,
        shares: Sequence[Share],
        audits: Sequence[Audit],
    ) -> Contents:
        """What this rank stores of a checkpoint."""
        plans = tuple([share.plan for share in shares if share.plan])
        return Contents(placed, skeleton, plans, Evidence(tuple(audits)) if plans else None)

    def open_shard(self, inflight: InFlight, nbytes: int, *, mapped: bool) -> ShardSink:
        """Register the next shard file of a checkpoint; nothing is opened yet."""
        name = shard_name(self._rank, len(inflight.shards))

        def place() -> Place:
            attempt = inflight.directory()
            recycled = self._store.take_slot(attempt, name, nbytes)
            return Place(attempt.path / name, recycled)

        # Restoring with another number of ranks takes parts of files.
        sums = SUM_BYTES if self._several else None
        return self._open(inflight, name, nbytes, place, mapped=mapped, sum_bytes=sums)

    def open_named_image(
        self, inflight: InFlight, pool: StagingPool, name: str, nbytes: int
    ) -> ShardImage:
        """Register a file that has a name of its own and any length; its image, which begins empty."""
        padded = align_up(nbytes, ALIGN_BYTES)

        def place() -> Place:
            return Place(file_path(self._files, inflight.directory(), name), recycled=False)

        sink = self._open(inflight, name, padded, place, exact_bytes=nbytes)
        return open_image(sink, pool, (0, padded), self.streams)

    def _open(
        self,
        inflight: InFlight,
        name: str,
        nbytes: int,
        place: Callable[[], Place],
        **more: Any,
    ) -> ShardSink:
        request = ShardRequest(
            name=name,
            nbytes=nbytes,
            place=place,
            direct_io=DirectIO(self._options.direct_io),
            checksum=self._options.checksum,
            step=inflight.step,
            **more,
        )
        return make_sink(
            inflight, ShardFile(request, files=self._files), self._writers_for(inflight)
        )

    def _writers_for(self, inflight: InFlight) -> WriterPool | HeldBack:
        if self._options.pipelined:
            return self._writers
        held = HeldBack(self._writers)
        inflight.until_staged(held.let_go)
        return held

    def open_held_image(self, sink: ShardSink, plan: LayerwisePlan) -> ShardImage:
        """The image of a layer-wise shard file, whose header comes last."""
        sizes = (plan.builder.header_bytes, plan.builder.file_bytes)
        return open_image(sink, plan.pool, sizes, self.streams, hold=True)

    def share_rest(self, flat: FlatState, scope: Scope) -> tuple[Share, AuditPlan]:
        """This rank's share of what a layer-wise save brings at its end, and what it looks at of it."""
        share = self._rest_sharer.share(flat, scope)
        return share, self.auditor.plan(share, flat.leaves)

    def room_for_rest(self, plan: LayerwisePlan, specs: Sequence[LeafSpec]) -> None:
        """Have memory for the second file of a layer-wise save, if it must be staged as a whole.

        Raises:
            ConfigError: `staging_bytes` is too small.
        """
        if self._options.pipelined or not specs:
            return
        nbytes = ShardLayout.plan([], specs).file_bytes
        self._memory.make_room(plan.pool, self._demand_of_layers(plan.builder, nbytes))
        self._rest_bytes = max(self._rest_bytes, nbytes)

    def rest_image(
        self, inflight: InFlight, pool: StagingPool, specs: Sequence[LeafSpec]
    ) -> tuple[ShardImage, ShardLayout]:
        """Image and layout of a second shard file, for what a layer-wise save brings at its end.

        It takes stream chunks only: the fronts of the pool were cut for the first file.
        """
        layout = ShardLayout.plan([], specs)
        sink = self.open_shard(inflight, layout.file_bytes, mapped=False)
        return open_image(sink, pool, (0, layout.file_bytes), self.streams), layout

    def check_named(self) -> None:
        """Whether named files can be saved with these options.

        Raises:
            ConfigError: they cannot.
        """
        if not self._options.pipelined:
            raise ConfigError(
                "pipelined=False: the length of named files is not known when a save of them begins, so no "
                "staging memory can be had for all of them; set pipelined=True"
            )

    def pool_for_named(self, nbytes: int, tensors: Sequence[torch.Tensor]) -> StagingPool:
        """The memory for a save of named files whose first one has `nbytes`; the others are not known yet.

        Made for as much as the largest such save so far took.
        """
        most = max(nbytes, self._named_bytes or _NAMED_CHUNKS * self._options.chunk_size)
        return self._memory.pool_for(
            self._memory.demand_of_files(most),
            pinned=bool(self.devices.of_all(tensors)),
            deadline=time.monotonic() + self._options.timeout_s,
        )

    def named_files_took(self, nbytes: int) -> None:
        """Note the length of all files of a save."""
        self._named_bytes = max(self._named_bytes, nbytes)

    def named_contents(self, inflight: InFlight) -> Contents:
        """What this rank stores of a save of named files; all ranks must mean the same directory."""
        to = inflight.destination
        assert to is not None
        plan = f"files in {to.directory!r} by {to.pointer!r}"
        plans = (plan,) if self._several else ()
        reference = TextReference(plan) if plans else None
        return Contents((), None, plans, reference, named_bytes=inflight.file_bytes)

    def flatten_rest(self, state: Any, staged: tuple[Leaf, ...]) -> FlatState:
        """The state at the end of a layer-wise save, without what has been staged."""
        return flatten(state, eager_leaf_bytes=self.eager_leaf_bytes, staged=staged)

    def stage(self, job: Any) -> None:
        """Run a job on the stager thread."""
        self._stager.submit(job)

    def close(self, *, timeout_s: float) -> None:
        """End the threads and let go of the memory. Idempotent."""
        self._stager.close(timeout_s=timeout_s)
        self._writers.close(timeout_s=timeout_s)
        self._memory.close(deadline=time.monotonic() + timeout_s)

    # -- inside ----------------------------------------------------------------------------------

    def _demand_of_layers(self, builder: LayoutBuilder, rest_bytes: int) -> PoolDemand:
        return self._memory.demand_of_layers(
            builder.file_bytes, builder.header_bytes, rest_bytes=rest_bytes
        )

    def _pool(self, leaves: tuple[Leaf, ...], demand: PoolDemand) -> StagingPool:
        return self._memory.pool_for(
            demand,
            pinned=self._on_device(leaves),
            deadline=time.monotonic() + self._options.timeout_s,
        )

    def _resolve_mode(self, leaves: tuple[Leaf, ...]) -> Mode:
        if self.mode is not Mode.AUTO:
            return self.mode
        return Mode.DEVICE if self._on_device(leaves) else Mode.HOST

    def _on_device(self, leaves: Sequence[Leaf]) -> bool:
        return bool(self.devices.of_all(leaf.tensor for leaf in leaves))


def _leaves_by_name(tensors: Mapping[str, torch.Tensor], flat: FlatState) -> dict[str, Leaf]:
    """Which leaf each of the caller's names stands for."""
    by_name = {leaf.spec.name: leaf for leaf in flat.leaves}
    by_view = {_view(leaf.tensor): leaf for leaf in flat.leaves}
    found = {}
    for name, tensor, occurrence in zip(
        tensors, tensors.values(), flat.skeleton.refs.leaf, strict=False
    ):
        # Tensors without elements are in no memory: their views tell nothing apart.
        leaf = by_view.get(_view(tensor)) if tensor.numel() else by_name.get(occurrence)
        leaf = leaf or by_name.get(name)
        if leaf is None or leaf.spec.shape != tuple(tensor.shape):
            raise ConfigError(
                f"tensors[{name!r}] overlaps another tensor in memory without being the same: a "
                f"layer-wise save takes distinct tensors; pass the one that covers both"
            )
        found[name] = leaf
    return found


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        tensor.numel() and tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )
