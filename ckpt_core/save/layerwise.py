"""A checkpoint that is staged name by name, as each tensor becomes final (LightCheck III-B).

    open --stage(names)*--> open --seal(state)--> sealed        open --abort()--> given up

The tensors given to `begin` go into one shard file in the order in which they are staged; what only `seal`
brings (counters, RNG, buffers) goes into a second one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.layout import BuilderMark, ShardLayout
from ckpt_core.save.admission import Admission
from ckpt_core.save.contents import Contents, Stored
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.journal import stalling
from ckpt_core.save.layers import LayerPlanner, LayerwisePlan, Tail
from ckpt_core.save.open_save import Errand, OpenSave
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.reading import Reading, look_at, stage_items
from ckpt_core.save.shards import Shards
from ckpt_core.save.staging import guarded, stage_still
from ckpt_core.save.still_files import open_still
from ckpt_core.share import Audit, Auditor, Placed, Scope, items_of
from ckpt_core.snapshot import LeafWatch, ShardImage, StageItem
from ckpt_core.state import Leaf
from ckpt_core.system.devices import Queued
from ckpt_core.units import count_text


@dataclass(frozen=True, slots=True)
class LayerwiseSaves:
    """Makes the saves of `Checkpointer.begin`; used on the training thread."""

    admission: Admission
    pipeline: Pipeline
    shards: Shards
    auditor: Auditor
    planner: LayerPlanner

    def begin(self, step: int, tensors: Mapping[str, torch.Tensor]) -> LayerwiseSave:
        """See `Checkpointer.begin`."""
        inflight = self.admission.announce(step)
        plan = self.planner.plan(tensors)
        self.admission.admit(inflight)
        return LayerwiseSave(self, inflight, plan)


class LayerwiseSave(OpenSave):
    """Given by `Checkpointer.begin`; used on the training thread. Must be sealed or aborted.

    One that is neither keeps its place among the in-flight checkpoints until `timeout`, and then fails.
    """

    def __init__(self, saves: LayerwiseSaves, inflight: InFlight, plan: LayerwisePlan) -> None:
        super().__init__(inflight, saves.pipeline, saves.admission)
        pipeline, auditor = saves.pipeline, saves.auditor
        self._planner, self._shards = saves.planner, saves.shards
        self._plan = plan
        self._left = {leaf.spec.name for leaf in plan.flat.leaves}
        self._parts = {part.stored.name: part for part in plan.share.parts}
        self._placed: dict[str, Placed] = {}
        leaves, self._turn = plan.given.leaves, auditor.turn(inflight.step)
        self._audit = auditor.audit(plan.share, leaves, self._turn)
        self._devices, self._streams = pipeline.devices, pipeline.streams
        self._watch, self._tail_watch = pipeline.watch_for(inflight), pipeline.watch_for(inflight)
        self._still_watches: list[LeafWatch] = []
        inflight.snapshot.name_leaves(self._leaf_name)
        builder = plan.builder
        sink = saves.shards.open(inflight, builder.file_bytes)
        # Also when the watchdog gives it up: the chunks that it holds must go back.
        inflight.open_ended = True
        # Its header comes last.
        sizes = (builder.header_bytes, builder.file_bytes)
        self._image = saves.shards.image(sink, plan.pool, sizes, hold=True)
        pipeline.stager.submit(self._run_start)

    @stalling
    def stage(self, names: Iterable[str]) -> None:
        """These tensors are final for the step: copy them, in this order, behind the training thread.

        Returns at once. They may change again after `Checkpointer.wait_staged(names)`.

        Raises:
            ConfigError: a name was not given to `begin`, or its tensor has another shape, dtype or strides
                since, or the save is sealed.
        """
        self._check_open()
        self._journal.note(partial(self._take_back, self._plan.builder.mark()))
        leaves = self._not_yet_staged(names)
        # Of what other ranks store of these tensors, this one looks at a little.
        looked_at = self._audit.names([leaf.spec.name for leaf in leaves])
        placed = [self._place(leaf) for leaf in leaves if leaf.spec.name in self._parts]
        named = items_of(self._plan.given.leaves, placed)
        staged, items = [name for name, _ in named], tuple([item for _, item in named])
        watched = partial(self._watch.keep, staged, items, self._watch.look(items))
        devices = self._devices
        behind = devices.queued(devices.of_all(leaf.tensor for leaf in leaves))
        run = partial(self._run_stage, looked_at, items, behind)
        note = partial(self._note, [leaf.spec.name for leaf in leaves], placed, watched)
        live = [*self._audit.live(looked_at), *items]
        there = placed or looked_at
        self._hand_over(Errand([*looked_at, *staged], live, run if there else None, note))

    @stalling
    def seal(
        self,
        state: Any = None,
        *,
        per_rank: Iterable[str] | None = None,
        replicated: Iterable[str] | None = None,
    ) -> SaveHandle:
        """End the checkpoint with everything that belongs to it; returns before it is durable.

        With `blocking` it returns when it is.

        Args:
            state: the tree that `restore` will be given; it holds the staged tensors again, each where it
                belongs. None: the mapping given to `begin` is the state.
            per_rank, replicated: as for `save`, of what was not staged.

        Raises:
            ConfigError: tensors were not staged, or are nowhere in `state`, or with pipelined=False all of
                it does not fit into `staging_bytes`; the save stays open.
            PersistError, CommitError, CoordinationTimeout: with `blocking`, it failed.
        """
        began = time.monotonic()
        self._check_open()
        if self._left:
            raise ConfigError(
                f"seal: not staged, but given to begin(): {count_text(len(self._left), 'tensor')}, "
                f"first {min(self._left)!r}: stage them, or abort()"
            )
        tail = None
        if state is not None:
            scope = Scope.of(state, per_rank=per_rank, replicated=replicated)
            tail = self._planner.tail(self._plan, state, scope, turn=self._turn)
            if not self._inflight.failed():
                self._planner.make_room(self._plan, tail)
        self._hand_over(self._end_of(tail))
        return self._sealed_handle(began)

    # -- training thread -------------------------------------------------------------------------

    def _leaf_name(self, name: str) -> str | None:
        leaf = self._plan.leaf_of.get(name)
        return None if leaf is None else leaf.spec.name

    def _not_yet_staged(self, names: Iterable[str]) -> list[Leaf]:
        leaves: dict[str, Leaf] = {}
        for name in names:
            leaf = self._plan.leaf_of.get(name)
            if leaf is None:
                raise ConfigError(f"stage: {name!r} was not among the tensors given to begin()")
            if leaf.spec.name in self._left:  # a second name of one tensor is staged already
                leaves[leaf.spec.name] = self._plan.given.now(name)
        return list(leaves.values())

    def _place(self, leaf: Leaf) -> Placed:
        extent = self._plan.builder.append(leaf.spec.name)
        return Placed(self._parts[leaf.spec.name], 0, extent)

    def _note(
        self, names: Sequence[str], placed: Sequence[Placed], watch: Callable[[], None]
    ) -> None:
        """What has been handed over. Idempotent."""
        self._left.difference_update(names)
        self._placed.update((place.extent.name, place) for place in placed)
        watch()

    def _take_back(self, mark: BuilderMark, error: BaseException) -> None:
        """A `stage` was interrupted before it had handed anything over."""
        self._plan.builder.go_back(mark)

    def _end_of(self, tail: Tail | None) -> Errand:
        run = partial(self._run_end, tail)
        if tail is None:
            return Errand((), (), run, self._note_sealed)
        # A new one, also if an earlier `seal` was interrupted.
        self._tail_watch = self._pipeline.watch_for(self._inflight)
        self._tail_watch.begin(tail.lazy_names, tail.lazy_items)
        self._still_watches = [self._pipeline.watch_for(self._inflight) for _ in tail.stills]
        names = [*tail.audit.names(), *tail.lazy_names]
        live = [*tail.audit.live(tail.audit.names()), *tail.lazy_items]
        for still, watch in zip(tail.stills, self._still_watches, strict=True):
            watch.begin(still.names, still.items)
            names += still.names
            live += still.items
        return Errand(names, live, run, self._note_sealed)

    # -- stager thread ---------------------------------------------------------------------------

    def _run_start(self) -> None:
        with guarded(self._inflight, [self._image], self._streams):
            self._image.skip_header(self._plan.builder.header_bytes)

    def _run_stage(
        self, looked_at: Sequence[str], items: tuple[StageItem, ...], behind: Queued
    ) -> None:
        if self._inflight.failed():
            return
        with guarded(self._inflight, [self._image], self._streams):
            self._streams.follow(behind)
            self._look_at(self._audit, looked_at)
            reading = Reading(self._streams, self._watch, bool(behind.events))
            stage_items(self._inflight.snapshot, self._image, items, reading)

    def _run_end(self, tail: Tail | None) -> None:
        images = [self._image]
        with guarded(self._inflight, images, self._streams):
            if self._inflight.failed():
                raise StagingError(f"step {self.step} was given up")
            placed, shares = list(self._placed.values()), [self._plan.share]
            audits = [self._audit]
            self._audit.done()
            # This image ends first: a checkpoint never holds more than one open stream chunk.
            self._image.set_header(self._plan.builder.finish().header)
            self._image.finish()
            if tail is not None:
                shares.append(tail.share)
                audits.append(tail.audit)
                self._look_at(tail.audit, tail.audit.names())
                tail.audit.done()
                placed += self._run_tail(tail, images)
                placed += self._run_stills(tail, images)
            self._streams.settle()
            self._watch.raise_if_changed()
            self._tail_watch.raise_if_changed()
            self._inflight.snapshot.complete()
            for image in images[1:]:
                image.finish()
            skeleton = self._plan.flat.skeleton if tail is None else tail.skeleton
            self._inflight.contents = Contents.of_leaves(Stored(placed), skeleton, shares, audits)
        self._inflight.staging_ended()

    def _run_tail(self, tail: Tail, images: list[ShardImage]) -> list[Placed]:
        """Stage the second file, all but its end; it joins `images`."""
        if not tail.parts:
            return []
        layout = ShardLayout.plan([], tail.specs)
        sink = self._shards.open(self._inflight, layout.file_bytes)
        # Stream chunks only: the fronts of the pool were cut for the first file.
        image = self._shards.image(sink, self._plan.pool, (0, layout.file_bytes))
        images.append(image)
        image.header(layout.header)
        self._streams.follow(tail.behind)
        parts = {part.stored.name: part for part in tail.parts}
        placed = [Placed(parts[extent.name], 1, extent) for extent in layout.extents]
        items = [item for _, item in items_of(tail.leaves, placed)]
        lazy = len(tail.lazy_names)
        handed = iter(tail.lazy_items)

        def copied(batch: Sequence[StageItem]) -> None:
            live = tuple(islice(handed, len(batch)))
            self._planner.sharing.look(live, tail.looked_at)
            self._tail_watch.end(live)

        on_devices = bool(tail.behind.events)
        reading = Reading(self._streams, self._tail_watch, on_devices, copied)
        stage_items(self._inflight.snapshot, image, items[:lazy], reading)
        image.leaves(items[lazy:])
        return placed

    def _run_stills(self, tail: Tail, images: list[ShardImage]) -> list[Placed]:
        """Stage the files of what tends to stay the same; those that are written join `images`."""
        if tail.stills and len(images) > 1:
            images[-1].finish()  # It may have the only chunk that is free.
        self._streams.follow(tail.behind)
        inflight, placed = self._inflight, list[Placed]()
        for leaves, watch in zip(tail.stills, self._still_watches, strict=True):
            number = len(inflight.shards)
            placed += [replace(place, file=number) for place in leaves.part.placed]
            still = open_still(
                *(self._shards, inflight, self._plan.pool, leaves, watch), self._planner.sharing
            )
            if still is None:
                inflight.snapshot.arrived(len(leaves.names))
                continue
            images.append(still.image)
            stage_still(
                inflight,
                still,
                self._pipeline,
                self._planner.sharing,
                on_devices=bool(tail.behind.events),
            )
            if still.shard.is_shared:
                images.remove(still.image)
        return placed

    def _look_at(self, audit: Audit, names: Sequence[str]) -> None:
        look_at(self._inflight.snapshot, audit, self._streams, names)
        self._inflight.snapshot.arrived(len(names))
