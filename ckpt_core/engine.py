"""The layers of one Checkpointer: made, opened and closed together.

PlainSaves | LayerwiseSaves | FilesSaves -> Admission -> Pipeline -> Flights -> Committer -> store
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.coordination import Coordination
from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.observe import EventLog, EventName, Outlets
from ckpt_core.options import Options
from ckpt_core.restore import RestoredStep, Restorer, RestoreRequest, tell_empty
from ckpt_core.save import (
    Admission,
    Barriers,
    Committer,
    Failures,
    FilesSaves,
    Flights,
    Gauges,
    Journal,
    LayerPlanner,
    LayerwiseSaves,
    NoLevels,
    OwnBarriers,
    Pipeline,
    PlainSaves,
    Shards,
    Surroundings,
    closed_meanwhile,
    make_store,
    open_together,
    refuse_fork,
    refuse_on,
)
from ckpt_core.share import Auditor
from ckpt_core.store import LEVEL_WORD, StepStore
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files
from ckpt_core.system.sigterm import SigtermGuard
from ckpt_core.types import OnError, check_step
from ckpt_core.units import count_text, html_table

if TYPE_CHECKING:
    from ckpt_core.levels import BringsBack

_log = logging.getLogger("ckpt_core")

_GRACE_S = 1.0
"""How long `close` waits for the threads when it finds storage stuck."""


class Engine:
    """Owns every thread, the root's lock and the connection to the other ranks. Making one takes nothing."""

    def __init__(
        self,
        root: Path,
        options: Options,
        coordination: Coordination,
        files: Files,
        devices: Devices,
    ) -> None:
        info = coordination.info
        self.options = options
        self.files = files
        self.coordination = coordination
        self.events, self.journal = EventLog(), Journal(options.timeout_s, self.refuse_here)
        self.failures = Failures(OnError(options.on_error))
        self.pipeline = Pipeline(options, devices, files=files, neighbours=info.neighbours)
        self.store = make_store(root, options, info, files=files, kept=self.pipeline.kept)
        auditor, own = Auditor(), OwnBarriers()
        self.levels = self._make_levels()
        self._make_flights(auditor)
        self._make_saves(auditor, own)
        stall = self.journal.stall
        self.gauges = Gauges(
            root, self.events, stall, coordination, self.pipeline, self.plain, self.levels
        )
        self.outlets = Outlets(root, self.events, info, waited_s=self.journal.waited_s)
        self.barriers = Barriers(
            self.flights,
            self.pipeline,
            own,
            events=self.events,
            stall=stall,
            timeout_s=options.timeout_s,
        )

    def _make_levels(self) -> NoLevels:
        if not self.options.levels:
            return NoLevels()
        # Not before: whoever has no levels shall not pay for them.
        from ckpt_core.levels import Levels

        levels = Levels(
            self.store.root,
            self.options.further,
            self.coordination,
            files=self.files,
            events=self.events,
            timeout_s=self.options.timeout_s,
        )
        if isinstance(self.store, StepStore):
            self.store.awaited, self.store.held = levels.awaited, levels.held
        return levels

    def _make_flights(self, auditor: Auditor) -> None:
        info, in_flight = self.coordination.info, self.options.in_flight
        self.committer = Committer(
            self.store,
            self.coordination,
            files=self.files,
            events=self.events,
            auditor=auditor,
            levels=self.levels,
            kept=self.pipeline.kept,
            in_flight=in_flight,
            announce=self._announce,
        )
        self.flights = Flights(
            in_flight,
            finish=self.committer.finish,
            # One more than may wait for other ranks: it tells them of a step that this rank declines.
            finishers=1 if info.world_size == 1 else in_flight + 1,
        )

    def _announce(self) -> None:
        """Where the root is, or was, a level: agents that have it as one would retire what is saved here."""
        if os.path.isfile(self.store.root / LEVEL_WORD):
            from ckpt_core.levels import keep_agents_off

            keep_agents_off(self.store.root, files=self.files)

    def _make_saves(self, auditor: Auditor, own: OwnBarriers) -> None:
        info, pipeline = self.coordination.info, self.pipeline
        around = Surroundings(
            self.store,
            self.coordination,
            self.events,
            self.failures,
            pipeline.stager,
            pipeline.devices,
            self.flights.ready,
            self.levels,
        )
        running = (around, self.flights, self.journal, own, self.options.timeout_s)
        admission = Admission(*running, refuse=self.refuse_here)
        shards = self.shards = Shards(pipeline, self.store, info, files=self.files)
        planner = LayerPlanner(pipeline, auditor, info)
        self.plain = PlainSaves(admission, pipeline, shards, auditor, info=info)
        self.layerwise = LayerwiseSaves(admission, pipeline, shards, auditor, planner)
        self.named = FilesSaves(admission, pipeline, shards, info=info)

    def restore(self, state: Any, request: Callable[[], RestoreRequest]) -> RestoredStep | None:
        """Fill a state once nothing is in flight; what came of it is told. As `Checkpointer.restore`."""
        self.refuse_here("restore")
        began = time.monotonic()

        def asked() -> RestoreRequest:
            nonlocal began
            wanted = request()
            self.flights.refuse_unsealed()
            if self.flights.wait_empty(deadline=time.monotonic() + self.options.timeout_s):
                self.store.gone_back()
            # What is read may be found damaged: nothing of it is shared any more.
            for saves in (self.plain, self.layerwise.planner, self.named):
                saves.sharing.forget()
            began = time.monotonic()
            return wanted

        restorer = Restorer(
            self.store.root,
            files=self.files,
            readers=self.options.readers,
            timeout_s=self.options.timeout_s,
            store=self.store,
            coordination=self.coordination,
            devices=self.pipeline.devices,
            further=self._further(),
            shown=self.options.progress,
        )
        found = restorer.restore_asked(state, asked)
        if found is not None:
            self.levels.restored(found.step)
            self.events.tell(EventName.RESTORED, found.step, seconds=time.monotonic() - began)
        elif self.coordination.info.rank == 0:
            tell_empty(self.gauges.root)
        return found

    def _further(self) -> BringsBack | None:
        store, options = self.store, self.options
        if not options.levels or not isinstance(store, StepStore):
            return None
        from ckpt_core.levels import BringsBack, Levels

        assert isinstance(self.levels, Levels)
        return BringsBack(
            self.levels.sources,
            store,
            self.coordination.info,
            files=self.files,
            timeout_s=options.timeout_s,
            errands=self.levels.errands,
        )

    def open(self) -> None:
        """Start the threads, and lock the root on every rank.

        Raises:
            RootBusy, PersistError, CommitError, CoordinationTimeout: see `Checkpointer`.
        """
        # First: a process that may start no more threads shall not lock, nor repair, anything.
        self.pipeline.start_threads()
        self.flights.start()
        self.levels.start()
        self._open_outlets()
        self.barriers.open()
        options = self.options
        open_together(
            self.store, self.coordination, levels=options.further, timeout_s=options.timeout_s
        )
        self.shards.look()
        self.outlets.found(self.store.steps)
        self.levels.open()

    def _open_outlets(self) -> None:
        options, root = self.options, str(self.store.root)
        opened = {"options": dataclasses.asdict(options), "root": root}
        self.outlets.write_down(options.events_file, opened=opened)
        if options.events_file is not None:
            self.barriers.passed = self.outlets.file.barrier
        self.outlets.count(options.metrics_place, root=root, levels=self.levels.gauges)

    def wait(self, level: int | str | None, *, last: bool) -> bool:
        """Wait until nothing is in flight nor asks a device for anything, and all due at a level is there.
        False where the first two took until `timeout`. Raises as `Checkpointer.wait`."""
        self.refuse_here("wait")
        if last and level is None:
            raise ConfigError("wait(last=True): say at which level: wait(level=1, last=True)")
        deadline = time.monotonic() + self.options.timeout_s
        ended = self.flights.wait_empty(deadline=deadline)
        if not ended or not self.pipeline.wait_locked(deadline=deadline):
            return False
        if level is not None:
            self.levels.wait(level, deadline=deadline, last=last)
        return True

    def refuse_here(self, call: str) -> None:
        """As `refuse_on`, of all its threads."""
        refuse_on([*self.flights.workers, *self.pipeline.workers, *self.levels.workers], call)
        if call != "close":  # which ends a save that it comes into
            self.flights.refuse_within(self.journal, call)

    def said(self) -> str:
        """What is in the root and under way, in a few words."""
        steps, info = self.store.steps(), self.coordination.info
        text = count_text(len(steps), "step") + (f", the newest is {steps[-1]}" if steps else "")
        text += "" if self.flights.idle else "; in flight"
        return text + (f"; rank {info.rank} of {info.world_size}" if info.world_size > 1 else "")

    def close(self) -> None:
        """Finish what is in flight, within `timeout`, end the threads, unlock. Interrupted: call it again."""
        self.flights.closed = closed_meanwhile(self.store.root)
        self.journal.sweep(self.flights.closed)
        self.flights.give_up_unsealed()
        deadline = time.monotonic() + self.options.timeout_s
        if not self.flights.wait_empty(deadline=deadline):
            self.flights.settle_all("the Checkpointer was closed while storage was stuck")
        self.end_threads(timeout_s=max(deadline - time.monotonic(), _GRACE_S))
        self.levels.close()
        self.let_go()

    def give_up(self) -> None:
        """As `close`, but wait for nothing that is in flight: it fails. Takes seconds."""
        self.flights.settle_all("nobody waited for it at the end of the process")
        self.end_threads(timeout_s=_GRACE_S)
        self.levels.give_up()
        self.let_go()

    def end_threads(self, *, timeout_s: float) -> None:
        """End every thread; one that hangs is left behind."""
        deadline = time.monotonic() + timeout_s
        try:
            self.pipeline.close(timeout_s=timeout_s)
        except StagingError as exc:
            _log.warning("staging memory is left to threads that hang: %s", exc)
        self.flights.close(timeout_s=max(deadline - time.monotonic(), _GRACE_S))
        for saves in (self.plain, self.layerwise.planner, self.named):
            saves.sharing.close()

    def let_go(self) -> None:
        """Unlock the root and say goodbye to the other ranks; steps of optimizers wait no more."""
        self.barriers.close()
        self.store.close()
        self.coordination.close()
        self.outlets.close()


class Looks:
    """What a `Checkpointer` tells of itself and of its root."""

    root: Path
    gauges: Gauges
    _engine: Engine
    _guard: SigtermGuard | None
    _closing: bool
    _closed: bool
    _pid: int

    def _check_process(self) -> None:
        refuse_fork(self.root, self._pid)

    def __repr__(self) -> str:
        return (
            f"<Checkpointer of {self.root}: {'closed' if self._closing else self._engine.said()}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        said = "closed" if self._closing else self._engine.said()
        rows = {"root": self.root, "holds": said, "options": self._engine.options}
        return html_table("Checkpointer", rows)

    def steps(self) -> tuple[int, ...]:
        """The committed steps, ascending."""
        return self._engine.store.steps()

    def latest_step(self) -> int | None:
        """The newest committed step; None when there is none."""
        return max(self._engine.store.steps(), default=None)

    def pin(self, step: int) -> None:
        """Keep a committed step until `unpin`, whatever the retention says; survives restarts.

        Of several ranks all call it: the first of those that share a root sets it, and hears of it.

        Raises:
            NotCommitted: it was retired, or never saved. One in flight or still to come can be pinned.
            PersistError: the pin could not be made durable.
            ConfigError: this is a fork of the process that made it; one made here may pin.
        """
        self._check_process()
        self._engine.store.pin(check_step(step))

    def unpin(self, step: int, *, retire: bool = False) -> None:
        """Give a step back to retention, which decides with the next commit; with `retire`, at once as well.

        Raises:
            PersistError: the change could not be made durable.
            ConfigError: `retire`, and the Checkpointer is closed, or this is a fork; nothing was changed.
        """
        self._check_process()
        if retire and self._closed:
            raise ConfigError(f"the Checkpointer of {self.root} is closed: it retires nothing")
        self._engine.store.unpin(check_step(step))
        if retire:
            self._engine.committer.retire()

    @property
    def options(self) -> Options:
        """The settings in force."""
        return self._engine.options

    @property
    def rank(self) -> int:
        """Number of this process among those that save together."""
        return self.gauges.rank

    @property
    def world_size(self) -> int:
        """How many processes save together."""
        return self.gauges.world_size

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM has come: save once more, `close`, and leave.

        Raises:
            ConfigError: without on_sigterm="save" this would always be False, and SIGTERM ends the process.
        """
        if self._guard is None:
            raise ConfigError(
                "stop_requested asks for SIGTERM, which ends this process at once, without a last step: give "
                "Checkpointer(..., on_sigterm='save')"
            )
        return self._guard.asked

    @property
    def staging_peak_bytes(self) -> int:
        """Most staging memory that was in use at one time; never above `staging_bytes`."""
        return self._engine.pipeline.memory.most_held_bytes
