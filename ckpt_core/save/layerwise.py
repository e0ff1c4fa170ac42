"""A checkpoint that is staged name by name, as each tensor becomes final (LightCheck III-B).

    open --stage(names)*--> open --seal(state)--> sealed        open --abort()--> given up

The tensors given to `begin` go into one shard file in the order in which they are staged; what only `seal`
brings (counters, RNG, buffers) goes into a second one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.layout import BuilderMark, Extent, nbytes
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.journal import stalling
from ckpt_core.save.open_save import Errand, OpenSave
from ckpt_core.save.pipeline import LayerwisePlan, Pipeline
from ckpt_core.save.staging import guarded, look_at, stage_items
from ckpt_core.share import Audit, Part, Placed, Scope, Share, items_of
from ckpt_core.snapshot import ShardImage, StageItem
from ckpt_core.state import FlatState, Leaf, Skeleton
from ckpt_core.system.devices import Devices, Queued
from ckpt_core.types import LeafSpec


class LayerwiseSave(OpenSave):
    """Given by `Checkpointer.begin`; used on the training thread. Must be sealed or aborted.

    One that is neither keeps its place among the in-flight checkpoints until `timeout`, and then fails.
    """

    def __init__(self, pipeline: Pipeline, inflight: InFlight, plan: LayerwisePlan) -> None:
        super().__init__(inflight, pipeline)
        self._plan = plan
        self._left = {leaf.spec.name for leaf in plan.flat.leaves}
        self._parts = {part.stored.name: part for part in plan.share.parts}
        self._placed: dict[str, Placed] = {}
        leaves, self._turn = plan.flat.leaves, pipeline.auditor.turn(inflight.step)
        self._audit = pipeline.auditor.audit(plan.share, plan.audit, leaves, self._turn)
        self._devices, self._streams = pipeline.devices, pipeline.streams
        self._watch, self._tail_watch = pipeline.watch_for(inflight), pipeline.watch_for(inflight)
        inflight.snapshot.name_leaves(self._leaf_name)
        sink = pipeline.open_shard(inflight, plan.builder.file_bytes, mapped=False)
        # Also when the watchdog gives it up: the chunks that it holds must go back.
        inflight.open_ended()
        self._image = pipeline.open_held_image(sink, plan)
        pipeline.stage(self._run_start)

    @stalling
    def stage(self, names: Iterable[str]) -> None:
        """These tensors are final for the step: copy them, in this order, behind the training thread.

        Returns at once. They may change again after `Checkpointer.wait_staged(names)`.

        Raises:
            ConfigError: a name was not given to `begin`, or the save is sealed.
        """
        self._check_open()
        self._journal.note(partial(self._take_back, self._plan.builder.mark()))
        leaves = self._not_yet_staged(names)
        # Of what other ranks store of these tensors, this one looks at a little.
        looked_at = self._audit.names([leaf.spec.name for leaf in leaves])
        placed = [self._place(leaf) for leaf in leaves if leaf.spec.name in self._parts]
        named = items_of(self._plan.flat.leaves, placed)
        staged, items = [name for name, _ in named], tuple([item for _, item in named])
        watched = partial(self._watch.keep, staged, items, self._watch.look(items))
        devices = self._devices
        behind = devices.queued(devices.of_all(leaf.tensor for leaf in leaves))
        run = partial(self._run_stage, looked_at, items, behind)
        done = _Staged(frozenset([leaf.spec.name for leaf in leaves]), placed, watched)
        live = [*self._audit.live(looked_at), *items]
        there = placed or looked_at
        self._hand_over(
            Errand([*looked_at, *staged], live, run if there else None, partial(self._note, done))
        )

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
                f"seal: {len(self._left)} tensors given to begin() were not staged, "
                f"first {min(self._left)!r}: stage them, or abort()"
            )
        rest = None
        if state is not None:
            scope = Scope.of(state, per_rank=per_rank, replicated=replicated)
            flat = self._rest_of(state)
            rest = (flat, self._tail_of(flat, scope))
            if not self._inflight.failed():
                self._pipeline.room_for_rest(self._plan, rest[1].specs)
        self._hand_over(self._end_of(rest))
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
                leaves[leaf.spec.name] = leaf
        return list(leaves.values())

    def _place(self, leaf: Leaf) -> Placed:
        extent = self._plan.builder.append(leaf.spec.name)
        return Placed(self._parts[leaf.spec.name], 0, extent)

    def _note(self, done: _Staged) -> None:
        """What has been handed over. Idempotent."""
        self._left -= done.names
        self._placed.update((place.extent.name, place) for place in done.placed)
        done.watch()

    def _take_back(self, mark: BuilderMark, error: BaseException) -> None:
        """A `stage` was interrupted before it had handed anything over."""
        self._plan.builder.go_back(mark)

    def _rest_of(self, state: Any) -> FlatState:
        flat = self._pipeline.flatten_rest(state, self._plan.flat.leaves)
        names = {leaf.spec.name for leaf in self._plan.flat.leaves}
        missing = names - flat.skeleton.leaf_names()
        if missing:
            raise ConfigError(
                f"seal: {len(missing)} staged tensors are nowhere in the state, first "
                f"{min(missing)!r}: they could not be restored; add them to the state"
            )
        return flat

    def _tail_of(self, flat: FlatState, scope: Scope) -> _Tail:
        share, plan = self._pipeline.share_rest(flat, scope)
        audit = self._pipeline.auditor.audit(share, plan, flat.leaves, self._turn)
        audit.read_eager(self._streams)
        return _tail(flat, share, audit, self._devices)

    def _end_of(self, rest: tuple[FlatState, _Tail] | None) -> Errand:
        if rest is None:
            run = partial(self._run_end, self._plan.flat.skeleton, None)
            return Errand((), (), run, self._note_sealed)
        flat, tail = rest
        # A new one, also if an earlier `seal` was interrupted.
        self._tail_watch = self._pipeline.watch_for(self._inflight)
        self._tail_watch.begin(tail.lazy_names, tail.lazy_items)
        run = partial(self._run_end, flat.skeleton, tail)
        names = tail.audit.names()
        live = [*tail.audit.live(names), *tail.lazy_items]
        return Errand([*names, *tail.lazy_names], live, run, self._note_sealed)

    # -- stager thread ---------------------------------------------------------------------------

    def _run_start(self) -> None:
        with guarded(self._inflight, [self._image]):
            self._image.skip_header(self._plan.builder.header_bytes)

    def _run_stage(
        self, looked_at: Sequence[str], items: tuple[StageItem, ...], behind: Queued
    ) -> None:
        if self._inflight.failed():
            return
        with guarded(self._inflight, [self._image]):
            self._streams.follow(behind)
            self._look_at(self._audit, looked_at)
            stage_items(self._inflight.snapshot, self._image, items, settle=self._settle)

    def _run_end(self, skeleton: Skeleton, tail: _Tail | None) -> None:
        images = [self._image]
        with guarded(self._inflight, images):
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
            self._streams.settle()
            self._watch.raise_if_changed()
            self._tail_watch.raise_if_changed()
            self._inflight.snapshot.complete()
            for image in images[1:]:
                image.finish()
            self._inflight.contents = self._pipeline.contents(
                tuple(placed), skeleton, shares, audits
            )
        self._inflight.staging_ended()

    def _run_tail(self, tail: _Tail, images: list[ShardImage]) -> list[Placed]:
        """Stage the second file, all but its end; it joins `images`."""
        if not tail.parts:
            return []
        image, layout = self._pipeline.rest_image(self._inflight, self._plan.pool, tail.specs)
        images.append(image)
        image.header(layout.header)
        self._streams.follow(tail.behind)
        parts = {part.stored.name: part for part in tail.parts}
        placed = [Placed(parts[extent.name], 1, extent) for extent in layout.extents]
        items = [item for _, item in items_of(tail.leaves, placed)]
        lazy = len(tail.lazy_names)
        handed = iter(tail.lazy_items)

        def settle(copied: Sequence[StageItem]) -> None:
            self._streams.settle()
            self._tail_watch.end(tuple(islice(handed, len(copied))))

        stage_items(self._inflight.snapshot, image, items[:lazy], settle=settle)
        image.leaves(items[lazy:])
        return placed

    def _look_at(self, audit: Audit, names: Sequence[str]) -> None:
        look_at(self._inflight.snapshot, audit, self._streams, names)
        self._inflight.snapshot.arrived(len(names))

    def _settle(self, items: Sequence[StageItem]) -> None:
        self._streams.settle()
        self._watch.end(items)


@dataclass(frozen=True, slots=True)
class _Staged:
    """What one call of `stage` has brought."""

    names: frozenset[str]
    placed: Sequence[Placed]
    watch: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Tail:
    """What `seal` brings, in the order in which it is copied: first what is still live, then clones.

    Attributes:
        share: what this rank stores of it.
        audit: what it looks at of what others store.
        parts: those of the share, in that order.
        leaves: of the flat state, small and early-changing ones replaced by clones.
        lazy_names: leaf of each item that is still live.
        lazy_items: these, in the same order, at offsets that are not those of a file.
        behind: what the copies wait for, the clones among it.
    """

    share: Share
    audit: Audit
    parts: tuple[Part, ...]
    leaves: Sequence[Leaf]
    lazy_names: tuple[str, ...]
    lazy_items: tuple[StageItem, ...]
    behind: Queued

    @property
    def specs(self) -> list[LeafSpec]:
        """What is stored of each part, in that order."""
        return [part.stored for part in self.parts]


def _tail(flat: FlatState, share: Share, audit: Audit, devices: Devices) -> _Tail:
    leaves = list(flat.leaves)
    for part in share.parts:
        leaf = leaves[part.index]
        if leaf.eager:
            leaves[part.index] = Leaf(leaf.spec, devices.clone(leaf.tensor), eager=True)
    # Order matters: behind the clones.
    behind = devices.queued(devices.of_all(leaves[part.index].tensor for part in share.parts))
    lazy = [part for part in share.parts if not leaves[part.index].eager]
    eager = [part for part in share.parts if leaves[part.index].eager]
    sizes = [nbytes(part.stored) for part in lazy]
    extents = map(Extent, [part.stored.name for part in lazy], accumulate(sizes, initial=0), sizes)
    named = items_of(
        leaves, [Placed(part, 1, extent) for part, extent in zip(lazy, extents, strict=True)]
    )
    names, items = tuple([name for name, _ in named]), tuple([item for _, item in named])
    return _Tail(share, audit, (*lazy, *eager), leaves, names, items, behind)
