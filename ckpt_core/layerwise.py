"""A checkpoint that is staged name by name, as each tensor becomes final (LightCheck III-B).

    open --stage(names)*--> open --seal(state)--> sealed        open --abort()--> given up

The tensors given to `begin` go into one shard file in the order in which they are staged; what only `seal`
brings (counters, RNG, buffers) goes into a second one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt_core.capture import LeafWatch, guarded, stage_items
from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.handle import SaveHandle
from ckpt_core.inflight import Contents, InFlight
from ckpt_core.layout import Extent
from ckpt_core.pipeline import LayerwisePlan, Pipeline
from ckpt_core.snapshot import StageItem, event_now, on_stream, synchronize
from ckpt_core.state import FlatState, Leaf
from ckpt_core.types import LeafSpec


class LayerwiseSave:
    """Given by `Checkpointer.begin`; used on the training thread. Must be sealed or aborted.

    One that is neither keeps its place among the in-flight checkpoints until `timeout`, and then fails.
    """

    def __init__(self, pipeline: Pipeline, inflight: InFlight, plan: LayerwisePlan) -> None:
        self._pipeline = pipeline
        self._inflight = inflight
        self._plan = plan
        self._left = {leaf.spec.name for leaf in plan.flat.leaves}
        self._extents: list[tuple[LeafSpec, int, Extent]] = []
        self._watch = LeafWatch(inflight.step, on=pipeline.check_barriers)
        self._sealed = False
        self._stream = pipeline.stream_for(plan.flat.leaves)
        inflight.snapshot.name_leaves(self._leaf_name)
        sink = pipeline.open_shard(inflight, plan.builder.file_bytes, mapped=False)
        self._image = pipeline.open_held_image(sink, plan)
        # Also when the watchdog gives it up: the chunks that it holds must go back.
        inflight.open_ended(lambda: pipeline.stage(self._run_abandon))
        pipeline.stage(self._run_start)

    @property
    def step(self) -> int:
        """The step it is of."""
        return self._inflight.step

    def stage(self, names: Iterable[str]) -> None:
        """These tensors are final for the step: copy them, in this order, behind the training thread.

        Returns at once. They may change again after `Checkpointer.wait_staged(names)`.

        Raises:
            ConfigError: a name was not given to `begin`, or the save is sealed.
        """
        self._check_open()
        leaves: list[Leaf] = []
        for name in names:
            leaf = self._plan.leaf_of.get(name)
            if leaf is None:
                raise ConfigError(f"stage: {name!r} was not among the tensors given to begin()")
            if leaf.spec.name in self._left:  # a second name of one tensor is staged already
                self._left.remove(leaf.spec.name)
                leaves.append(leaf)
        if not leaves or self._inflight.failed():
            return
        items = tuple(self._place(leaf) for leaf in leaves)
        staged = [leaf.spec.name for leaf in leaves]
        self._watch.begin(staged, items)
        self._inflight.snapshot.expect(staged)
        event = event_now()
        self._pipeline.stage(lambda: self._run_stage(items, event))

    def seal(self, state: Any = None) -> SaveHandle:
        """End the checkpoint with everything that belongs to it; returns before it is durable.

        Args:
            state: the tree that `restore` will be given; it holds the staged tensors again, each where it
                belongs. None: the mapping given to `begin` is the state.

        Raises:
            ConfigError: tensors were not staged, or are nowhere in `state`; the save stays open.
        """
        began = time.monotonic()
        self._check_open()
        if self._left:
            raise ConfigError(
                f"seal: {len(self._left)} tensors given to begin() were not staged, "
                f"first {min(self._left)!r}: stage them, or abort()"
            )
        flat = self._plan.flat
        rest: tuple[Leaf, ...] = ()
        if state is not None:
            flat, rest = self._rest_of(state)
        self._sealed = True
        if not self._inflight.failed():
            self._start_end(flat, rest)
        self._inflight.end_announced()
        return SaveHandle.of(self._inflight, began)

    def abort(self) -> None:
        """Give the checkpoint up; nothing of it becomes visible. Idempotent."""
        if self._sealed:
            return
        self._sealed = True
        self._inflight.reported = True
        self._inflight.fail(StagingError(f"step {self.step} was aborted by the caller"))

    # -- training thread -------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._sealed:
            raise ConfigError(f"the layer-wise save of step {self.step} is sealed: begin a new one")

    def _leaf_name(self, name: str) -> str | None:
        leaf = self._plan.leaf_of.get(name)
        return None if leaf is None else leaf.spec.name

    def _place(self, leaf: Leaf) -> StageItem:
        extent = self._plan.builder.append(leaf.spec.name)
        self._extents.append((leaf.spec, 0, extent))
        return (leaf.tensor, extent.offset, extent.nbytes)

    def _rest_of(self, state: Any) -> tuple[FlatState, tuple[Leaf, ...]]:
        flat = self._pipeline.flatten_rest(state, self._plan.flat.leaves)
        names = {leaf.spec.name for leaf in self._plan.flat.leaves}
        missing = names - flat.skeleton.leaf_names()
        if missing:
            raise ConfigError(
                f"seal: {len(missing)} staged tensors are nowhere in the state, first "
                f"{min(missing)!r}: they could not be restored; add them to the state"
            )
        return flat, flat.leaves

    def _start_end(self, flat: FlatState, rest: tuple[Leaf, ...]) -> None:
        # Small and early-changing leaves are cloned here; the others are copied by the stager.
        lazy = [leaf for leaf in rest if not leaf.eager]
        frozen = [
            Leaf(leaf.spec, leaf.tensor.clone() if leaf.eager else leaf.tensor, leaf.eager)
            for leaf in rest
        ]
        self._inflight.snapshot.expect([leaf.spec.name for leaf in lazy])
        ordered = tuple(sorted(frozen, key=lambda leaf: leaf.eager))
        event = event_now()
        self._pipeline.stage(lambda: self._run_end(flat, ordered, len(lazy), event))

    # -- stager thread ---------------------------------------------------------------------------

    def _run_start(self) -> None:
        with guarded(self._inflight, [self._image]):
            self._image.skip_header(self._plan.builder.header_bytes)

    def _run_stage(self, items: tuple[StageItem, ...], event: Any) -> None:
        if self._inflight.failed():
            return
        with guarded(self._inflight, [self._image]), on_stream(self._stream, event):
            stage_items(self._inflight.snapshot, self._image, items, settle=self._settle)

    def _run_end(
        self, flat: FlatState, rest: tuple[Leaf, ...], lazy_count: int, event: Any
    ) -> None:
        images = [self._image]
        with guarded(self._inflight, images), on_stream(self._stream, event):
            if self._inflight.failed():
                raise StagingError(f"step {self.step} was given up")
            extents = list(self._extents)
            # This image ends first: a checkpoint never holds more than one open stream chunk.
            self._image.set_header(self._plan.builder.finish().header)
            self._image.finish()
            if rest:
                image, layout = self._pipeline.rest_image(self._inflight, self._plan.pool, rest)
                images.append(image)
                image.header(layout.header)
                tensors = {leaf.spec.name: leaf for leaf in rest}
                items = [(tensors[e.name].tensor, e.offset, e.nbytes) for e in layout.extents]
                stage_items(
                    self._inflight.snapshot, image, items[:lazy_count], settle=self._wait_stream
                )
                image.leaves(items[lazy_count:])
                extents += [(tensors[e.name].spec, 1, e) for e in layout.extents]
            synchronize(self._stream)
            self._watch.raise_if_changed()
            self._inflight.snapshot.complete()
            if rest:
                image.finish()
            self._inflight.contents = Contents(tuple(extents), flat.skeleton)
        self._inflight.staging_ended()

    def _run_abandon(self) -> None:
        self._image.abandon()
        self._inflight.staging_ended()

    def _settle(self, items: Sequence[StageItem]) -> None:
        synchronize(self._stream)
        self._watch.end(items)

    def _wait_stream(self, items: Sequence[StageItem]) -> None:
        synchronize(self._stream)
