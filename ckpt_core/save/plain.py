"""A save in one call: flatten, lay out, copy what must be copied now, and let the stager have the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ckpt_core.save.admission import Admission
from ckpt_core.save.closing import refuse_halfway
from ckpt_core.save.contents import Contents, Stored
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.shards import Shards
from ckpt_core.save.staging import Fronts, StageJob, source_of
from ckpt_core.save.still_files import StillFile, StillLeaves, open_still, still_leaves
from ckpt_core.save.still_group import StillGroup
from ckpt_core.save.unchanged import sharing_for
from ckpt_core.share import Arrangement, Auditor, Scope, Sharer, arrange
from ckpt_core.snapshot import StagingPool
from ckpt_core.state import FlatState, SpecMemo, flatten
from ckpt_core.types import Mode, RankInfo

_log = logging.getLogger("ckpt_core")


@dataclass(slots=True)
class _Used:
    """How the leaves of one save are staged. The stager changes it, maybe when later saves have begun."""

    mode: Mode


@dataclass(frozen=True)
class SavePlan:
    """A state that can be saved: its leaves, where they go, how they are staged, and the memory for it."""

    flat: FlatState
    arrangement: Arrangement
    stills: tuple[StillLeaves, ...]
    stored: Stored
    mode: Mode
    pool: StagingPool


class PlainSaves:
    """Makes the saves of `Checkpointer.save`; used on the training thread.

    Attributes:
        mode: how leaves are staged from the next save on. AUTO leaves the choice to the leaves; a policy
            that has measured prefers another.
    """

    def __init__(
        self,
        admission: Admission,
        pipeline: Pipeline,
        shards: Shards,
        auditor: Auditor,
        *,
        info: RankInfo,
    ) -> None:
        self._admission = admission
        self._pipeline = pipeline
        self._shards = shards
        self._auditor = auditor
        self._sharer = Sharer(info)
        self._known: tuple[Arrangement, tuple[StillGroup, ...], Stored] | None = None
        self.sharing = sharing_for(pipeline.options, pipeline.devices)
        self._memo = SpecMemo()
        self._fronts = Fronts()
        self.prefer(Mode(pipeline.options.mode))
        self._told_no_room = False

    def prefer(self, mode: Mode) -> None:
        """Stage leaves in this way from the next save on."""
        self.mode, self._used = mode, _Used(mode)

    @property
    def mode_used(self) -> Mode:
        """How the leaves of the last save are staged; before the first one, `mode`."""
        return self._used.mode

    def save(
        self,
        step: int,
        state: Any,
        *,
        per_rank: Iterable[str] | None,
        replicated: Iterable[str] | None,
    ) -> SaveHandle:
        """See `Checkpointer.save`."""
        began, journal = time.monotonic(), self._admission.journal
        inflight = self._admission.announce(step)
        scope = Scope.of(state, per_rank=per_rank, replicated=replicated)
        journal.pause_collector(self._leaf_count)
        plan = self._plan(state, scope)
        if self._admission.must_wait():
            # Where nothing waits, the collector would only walk the plan, and once more at the end.
            journal.mine.resume_collector()
        self._admission.admit(inflight)
        journal.pause_collector(self._leaf_count)
        self._start(inflight, plan)
        if self._admission.is_behind_barrier():
            self._admission.wait_copied(inflight)
        # It goes on by itself from here, also while this thread waits for it.
        mine = journal.mine
        mine.undo = None
        mine.resume_collector()
        return SaveHandle.of(inflight, began, blocking=self._pipeline.options.blocking)

    def prepare(
        self, state: Any, *, per_rank: Iterable[str] | None, replicated: Iterable[str] | None
    ) -> None:
        """See `Checkpointer.prepare`."""
        refuse_halfway("prepare")
        self._admission.refuse_capture()
        scope = Scope.of(state, per_rank=per_rank, replicated=replicated)
        plan = self._plan(state, scope)
        used = self._pipeline.devices.of_all(plan.flat.tensors)
        if used and plan.mode is not Mode.DIRECT:
            self._pipeline.lock_behind(plan.pool, used[0])
        else:
            plan.pool.touch()

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _leaf_count(self) -> int:
        """Of the last plan: of each leaf, an alias lives on behind `save`."""
        return 0 if self._known is None else len(self._known[0].names)

    def _plan(self, state: Any, scope: Scope) -> SavePlan:
        """Find everything that can be wrong with the input, before the checkpoint is started."""
        pipeline = self._pipeline
        flat = flatten(state, eager_leaf_bytes=pipeline.eager_leaf_bytes, memo=self._memo)
        share, known = self._sharer.share(flat, scope), self._known
        groups = self.sharing.groups(flat, share)
        if known is None or known[0].share is not share or known[1] is not groups:
            arrangement = arrange(flat, share, [group.names for group in groups])
            # Swapped as a whole: an interrupt may come between two assignments.
            known = self._known = arrangement, groups, Stored(arrangement.all_placed)
        arrangement, _, stored = known
        stills = still_leaves(flat, arrangement, groups, self.sharing)
        mode = self._resolve_mode(flat.tensors, arrangement.file_bytes)
        demand = pipeline.memory.demand_of_save(
            arrangement.file_bytes, arrangement.layout.front_bytes, mapped=mode is Mode.DIRECT
        )
        pool = pipeline.pool_for(demand)
        return SavePlan(flat, arrangement, stills, stored, mode, pool)

    def _start(self, inflight: InFlight, plan: SavePlan) -> None:
        """Copy the front on this thread and queue the rest; the checkpoint then goes on by itself.

        Invariant: nothing leaves for the writers before the stager has the job, so that until then all
        that an interrupt leaves behind is in `inflight` and its images.
        """
        pipeline, shards, flat = self._pipeline, self._shards, plan.flat
        arrangement, layout = plan.arrangement, plan.arrangement.layout
        share, turn = arrangement.share, self._auditor.turn(inflight.step)
        # Nothing is looked at in a job of one, and few of its leaves are asked for one by one.
        audit = self._auditor.audit(share, flat.leaves if share.plan else (), turn)
        inflight.contents = Contents.of_leaves(plan.stored, flat.skeleton, [share], [audit])
        copies = pipeline.eager_copies()
        audit.read_eager(pipeline.streams, copies)
        beside = [still.items for still in plan.stills]
        source = source_of(
            *(flat, arrangement, beside), mode=plan.mode, copies=copies, fronts=self._fronts
        )
        used = self._used = _Used(source.mode)
        offsets, show = self.sharing.offsets(arrangement), None
        if source.behind.events and (looks := self.sharing.looks(offsets)) is not None:
            offsets, show = {}, looks.show
        sink = shards.open(inflight, layout.file_bytes, mapped=used.mode is Mode.DIRECT, show=show)
        sizes = (layout.front_bytes, layout.file_bytes)
        image = shards.image(sink, plan.pool, sizes, hold=True)
        watch = pipeline.watch_for(inflight)
        stills = self._stills(inflight, plan)
        job = StageJob(
            *(inflight, image, source, audit, watch, pipeline, partial(self._no_room, used)),
            *(self.sharing, offsets, (flat.tensors, flat.origin.tensors), stills),
        )
        inflight.snapshot.name_leaves(lambda name: name if name in arrangement.names else None)
        job.announce()
        image.header(layout.header)
        job.copy_front()
        pipeline.stager.submit(job.run)
        # The stager does so too, but may be busy with older checkpoints.
        pipeline.writers.submit(image.let_go)

    def _stills(self, inflight: InFlight, plan: SavePlan) -> list[StillFile]:
        """The still files that have to be read; those that need not be are shared at once."""
        found = [
            open_still(
                *(self._shards, inflight, plan.pool, one, self._pipeline.watch_for(inflight)),
                self.sharing,
            )
            for one in plan.stills
        ]
        # Order matters: those that may be cloned on their devices are so before any other is read.
        return sorted(filter(None, found), key=lambda still: not still.copied)

    def _no_room(self, used: _Used) -> None:
        """Called by the stager: a save in DEVICE mode has become one in HOST mode."""
        if not self._told_no_room:
            self._told_no_room = True
            _log.warning(
                "no room for clones on the device, or leaves that are not on one: staged as in mode "
                "'host', so that the barrier waits for the copies to the host"
            )
        used.mode = Mode.HOST

    def _resolve_mode(self, tensors: Sequence[Tensor], file_bytes: int) -> Mode:
        if self.mode is Mode.DIRECT and not self._shards.may_map:
            return Mode.HOST
        if self.mode is not Mode.AUTO:
            return self.mode
        if self._pipeline.devices.any_of(tensors):
            return Mode.DEVICE
        # The file is the staging memory then. With pages of 4 KiB each has a fault where a file is mapped
        # anew, which takes longer than the copy into staging memory and out of it again. With two phases no
        # byte may reach the file in the first.
        options = self._pipeline.options
        if not options.pipelined or options.share_unchanged:
            return Mode.HOST
        mapped = self._shards.is_mapped_for_nothing(file_bytes)
        return Mode.DIRECT if mapped else Mode.HOST
