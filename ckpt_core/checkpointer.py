"""The engine's face: `Checkpointer` wires the layers together and owns no algorithm.

save -> state/ -> share/, layout/ -> snapshot/ -> persist/ -> store/        restore -> restore/
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Self

import torch

from ckpt_core.coordination import Coordination, checked_coordination
from ckpt_core.engine import Engine, Looks
from ckpt_core.errors import ConfigError
from ckpt_core.options import Level, Options, checked_options, checked_root
from ckpt_core.restore import RestoredStep, RestoreRequest
from ckpt_core.save import FilesSave, LayerwiseSave, OnClose, SaveHandle, in_flight_of, stalling
from ckpt_core.state import Selection
from ckpt_core.system.compiling import untraced
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files
from ckpt_core.system.sigterm import SigtermGuard
from ckpt_core.system.threads import at_exit, lending_locks
from ckpt_core.units import parse_timeout

_log = logging.getLogger("ckpt_core")


class Checkpointer(Looks):
    """Saves and restores the state of one training run, in one root directory.

    Made once, before training, by the process that trains; used from its training thread. The root is
    locked for writing until `close`. A save costs the training thread a flattening of the state and the
    copy of its small leaves; everything else happens behind it.

    Args:
        root: directory of this run's checkpoints, made if missing; "~" is home; links are followed once, now.
        options: see `Options`.
        levels: more roots, to which committed steps are taken behind training: `options.levels` in short.
        coordination: how the ranks of one job agree; None for one process. One for each Checkpointer,
            which closes it. All ranks make their Checkpointers together, and save the same steps.
        on_sigterm: "save" turns SIGTERM into `stop_requested`, so that the loop can save once more and leave.
        sigterm_grace: how long after SIGTERM the process may live on (timedelta or seconds), also where
            the main thread is stuck. What is in flight goes on meanwhile.
        files, devices: the doors to both; for tests.

    Raises:
        ConfigError: an argument is wrong.
        RootBusy: another process, or Checkpointer, has the root open for writing; or another run has a level.
        RestoreError: a level cannot be reached, and this root has no run yet: there may be one to go on with.
        PersistError: the root cannot be made or written to, or the threads could not be started.
        CommitError, CoordinationTimeout: another rank could not open the root, or did not come.
        StagingError: with `on_sigterm`, no thread could be started for it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        options: Options | None = None,
        *,
        levels: Sequence[Level | Mapping[str, Any] | str] | None = None,
        coordination: Coordination | None = None,
        on_sigterm: Literal["save"] | None = None,
        sigterm_grace: timedelta | float = 30.0,
        files: Files | None = None,
        devices: Devices | None = None,
    ) -> None:
        checked = checked_options(options, levels)
        if on_sigterm not in (None, "save"):
            raise ConfigError(f"on_sigterm={on_sigterm!r} is unknown: use 'save' or None")
        self.root = checked_root(root)
        self._pid = os.getpid()
        self._closing = self._closed = False
        self._on_close = OnClose()
        self._guard: SigtermGuard | None = None
        parse_timeout(sigterm_grace, field="sigterm_grace")
        ranks = checked_coordination(coordination)
        engine = Engine(self.root, checked, ranks, files or Files(), devices or Devices())
        self._engine, self._journal = engine, engine.journal
        self.events, self.gauges = engine.events, engine.gauges
        # The threads are daemons, and a started checkpoint must not die with them. `close` cancels it.
        self._at_exit = at_exit(self._close_quietly, self._abandon, priority=10)
        try:
            engine.open()
            self._guard = SigtermGuard(sigterm_grace) if on_sigterm else None
            engine.levels.stays = True
            # An interrupt that has come by now is raised here, and not when nobody has the object yet.
            time.sleep(0)
        except BaseException:
            try:
                self._unmake()
            except BaseException:
                # A second interrupt: nobody has the object, so nobody else would let go of the root.
                self._unmake()
                raise
            raise

    # -- saving ----------------------------------------------------------------------------------

    @stalling
    def save(
        self,
        step: int,
        state: Any,
        *,
        per_rank: Iterable[str] | None = None,
        replicated: Iterable[str] | None = None,
    ) -> SaveHandle:
        """Start a checkpoint of `state` as of `step`; returns before it is staged or durable.

        Called on the training thread between two steps. Buffers of modules, NumPy arrays, plain values and
        every small leaf have been copied when it returns. Parameters, optimizer state and large tensors
        given as such are still read until they are staged: each step of a torch optimizer waits for that by
        itself, and whatever else changes them has to call `wait_staged` first. Blocks only
        while `in_flight` checkpoints are under way, and with `blocking` until the step is committed.

        Args:
            step: optimizer step, 0 or more. A committed step of this number is replaced as a whole.
            state: nested dict, list, tuple or dataclass of tensors, plain values, objects with state_dict().
            per_rank: with several ranks, paths of the state (such as "sampler" or "model.head") whose
                tensors belong to this rank alone. `RngState` is always private, and plain values are
                each rank's own. Everything else is replicated: equal on all ranks, each of which stores
                a slice. Buffers of a module that is passed as an object are stored by the first rank
                alone, as DistributedDataParallel takes them; a DTensor's parts by those who hold them.
            replicated: the other way round: paths that are replicated; everything else is private.

        Raises:
            ConfigError: `close` came meanwhile, or something cannot be saved: names its place in the tree.
            CkptError: with on_error="raise", an earlier save failed in the background; this one was not
                started, and the next call tries again.
            StagingError: no earlier checkpoint, or save of another thread, ended within `timeout`.
            PersistError, CommitError, CoordinationTimeout: with `blocking`, this one failed.
        """
        self._check_usable()
        return self._engine.plain.save(step, state, per_rank=per_rank, replicated=replicated)

    @stalling
    def begin(self, step: int, tensors: Mapping[str, torch.Tensor]) -> LayerwiseSave:
        """Start a layer-wise checkpoint: say later, name by name, when each tensor is final for `step`.

        Called on the training thread before the first of `tensors` is final. Then `stage(names)` as they
        become final, and `seal(state)` at the end of the step; `state` may hold any of `tensors` again,
        which are then not copied twice.

        Args:
            step: as for `save`.
            tensors: distinct tensors by name, replicated when there are several ranks.

        Raises:
            ConfigError: the step is wrong, or two tensors share memory.
            CkptError, StagingError: as for `save`.

        Source: LightCheck III-B, on the caller's own hooks.
        """
        self._check_usable()
        return self._engine.layerwise.begin(step, tensors)

    @stalling
    def begin_files(
        self,
        step: int,
        directory: str,
        *,
        pointer: str | None = None,
        replaces: Iterable[str] | None = None,
    ) -> FilesSave:
        """Start a checkpoint that becomes a directory of named files, for programs that `torch.load` them.

        Called on the training thread, on every rank. Then `add(name, tree)` for each file of this rank, and
        `seal()`. Once all files of all ranks are durable, one rename gives the directory its name, and
        replaces what has it. It is no step: `steps`, `restore` and retention leave it alone.

        Args:
            step: as for `save`; for messages, events and `wait_staged(before=)`.
            directory: its name in the root.
            pointer: a file in the root that then holds the name of the directory, without a newline.
                Replaced atomically, and never by a save that began before the one that it names.
            replaces: names, with wildcards, of the files that go with a directory that is replaced. All
                others, which somebody has put there, are kept. By default all go.

        Raises:
            ConfigError: an argument is wrong, or `pipelined` is off.
            CkptError, StagingError: as for `save`.
        """
        self._check_usable()
        return self._engine.named.begin(step, directory, pointer=pointer, replaces=replaces)

    @stalling
    def wait_staged(
        self, names: Iterable[str] | None = None, *, before: int | LayerwiseSave | None = None
    ) -> None:
        """Block until training may change the leaves of every started snapshot, on this thread.

        What this thread asks of a device from then on, in its current streams, runs behind copies that are
        still under way there. Steps of torch optimizers wait by themselves: this is for other changes, or
        those before the first step after a save; called on the training thread right before.

        Args:
            names: wait for these leaves alone; None for all. One that a save does not know waits for all.
            before: of snapshots of lower steps than this alone, or besides this save, which is open, or all.

        Raises:
            StagingError: not within `timeout`.
        """
        self._check_process()
        self._engine.barriers.wait(names, before=in_flight_of(before))

    def leave_barrier_to_owner(self, optimizer: torch.optim.Optimizer) -> None:
        """Let steps of this optimizer wait for nothing: whoever makes them, in parts, calls `wait_staged`."""
        self._engine.barriers.leave_to_owner(optimizer)

    def is_staged(
        self, names: Iterable[str] | None = None, *, before: int | LayerwiseSave | None = None
    ) -> bool:
        """Whether `wait_staged` with the same arguments would return at once; where so, it has been done."""
        self._check_process()
        return self._engine.flights.is_staged(names, before=in_flight_of(before))

    @stalling
    def wait(self, *, level: int | str | None = None, last: bool = False) -> None:
        """Block until nothing is in flight, nor any memory page-locked behind `prepare`.

        Until the next save, `prepare` or `restore` the engine then asks no device for anything.

        Args:
            level: and until all that is committed and due at this further level (its number, counted
                from 1, or its URL) has come there, with its pins.
            last: and until what was saved last is whole there, whatever `every` says: for the end of a
                program, where the agent ends with it (a container), or the machine does. Of several ranks
                each calls it.

        Raises:
            ConfigError: there is no such level, or `last` without one; or a thread of the engine calls; or
                this thread has begun a save and not sealed it.
            PersistError: the agent could not be told of the last step.
            CkptError: with on_error="raise", a save failed in the background.
            StagingError: something was still in flight after `timeout`.
            CommitError: steps have not come to the level within `timeout`, or never will; says why.
        """
        self._check_process()
        if not self._engine.wait(level, last=last):
            raise self._engine.flights.not_empty()
        self._engine.failures.report()

    @untraced
    def prepare(
        self,
        state: Any,
        *,
        per_rank: Iterable[str] | None = None,
        replicated: Iterable[str] | None = None,
    ) -> None:
        """Allocate and touch the staging memory for `state` now, instead of during the first save.

        Called once before training, with the arguments of `save`. Optional: the first save is then as
        cheap as the later ones. With leaves on a device it returns at once, and memory is page-locked in
        the background, 0.2 s for each GB; `wait` waits for that.

        Raises:
            ConfigError: it cannot be saved, `staging_bytes` is too small, or a graph is being captured.
        """
        self._check_usable()
        self._engine.plain.prepare(state, per_rank=per_rank, replicated=replicated)

    # -- restoring -------------------------------------------------------------------

    @untraced
    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = False,
        trusted: bool = False,
        broadcast: torch.distributed.ProcessGroup | bool = False,
        only: Iterable[str] | None = None,
        partial: bool = False,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> RestoredStep | None:
        """Fill `state` in place from the newest valid step; None when there is no step.

        Called on the training thread before training. Tensors and objects with `load_state_dict` are
        filled in place; plain values are in `.state` of the result. A corrupt step is passed over with a
        warning, for the next older one. With several ranks all of them call it, and all restore the same
        step: one that a node lacks or finds corrupt is passed over by all. It may have been saved by
        another number of ranks.

        With `levels` a step counts wherever it is whole: one that a root lacks, or has damaged, is brought
        there first, from the nearest level. That may take longer than `timeout`, as long as bytes come.

        Args:
            state: the tree that was saved, of live objects; any placeholder does for plain values.
            step: this step and no other.
            strict: raise for a corrupt step instead of falling back.
            trusted: allow objects that could run code when they are loaded.
            broadcast: ranks that read what all of them take whole only once, each its share, and send it
                to one another; True for all ranks. For storage that is slower than the network.
            only: entries of `state` that are wanted, with all in them, such as "model" or "model.encoder";
                nothing else is read or changed. None: all.
            partial: fill what fits, and leave the rest as it is: `.left_out` of the result, and a warning,
                say what that is. What has a `load_state_dict` and is no module is taken whole or not at all.
            rename: paths in the checkpoint, with all that is below them, and what they are called in
                `state`; or a function from the one to the other.

        Raises:
            ConfigError: `only` or `rename` does not fit, or a save is not sealed; nothing was changed.
            StateMismatch: names, shapes or dtypes differ, or nothing fits; nothing was changed, unless the
                text says that live tensors hold bytes of a newer, damaged step.
            CorruptCheckpoint: no step is valid (or the one asked for is not).
            NotCommitted: `step` is not there, or no step is held by every node.
            UntrustedData, UnknownFormat: see there.
            RestoreError: no step can be read, or another rank failed (named); or there is none here, and a
                level could not be asked.
        """
        self._check_usable()

        def asked() -> RestoreRequest:
            part = Selection.of(only, partial=partial, rename=rename)
            return RestoreRequest(
                step, strict=strict, trusted=trusted, broadcast=broadcast, part=part
            )

        return self._engine.restore(state, asked)

    # -- end -------------------------------------------------------------------------------------

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when `close` begins, so that it can seal a save that it holds open.

        Not called where a `with` block ends in an error, nor at exit: the state is that of no step then.
        What it raises `close` raises, at its end. Interrupted, it is called again by the next `close`.
        """
        self._on_close.add(callback)

    @lending_locks
    def close(self) -> None:
        """Finish what is in flight, within `timeout`, then end the threads and unlock the root. Idempotent.

        Interrupted, it can be called again, and else goes on at the end of the process. In a signal handler
        it gives up the call that it came into. A thread that hangs on storage is left behind: all it
        can do once it is back is delete its attempt.

        Raises:
            CkptError: with on_error="raise", a save failed in the background and was not reported yet.
            ConfigError: a callback or a subscriber calls, on a thread of the engine; nothing was ended.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._engine.refuse_here("close")
        error = self._on_close.call()
        self._end(self._engine.close)
        if error is not None:
            raise error
        self._engine.failures.report()

    def _unmake(self) -> None:
        self._engine.levels.stays = False  # it was never made: nothing is to be taken on for it
        self._abandon()

    def _abandon(self) -> None:
        """Let go of everything within seconds: the rest could not be opened, or nobody waits for `close`."""
        self._end(self._engine.give_up)

    def _close_quietly(self) -> None:
        self._on_close.clear()
        try:
            self.close()
        except Exception as exc:
            _log.error("closing the Checkpointer of %s: %s", self.root, exc)

    def _end(self, end_engine: Callable[[], None]) -> None:
        self._closing = True
        try:
            end_engine()
        finally:
            if self._guard is not None:
                self._guard.close()
        # Last: interrupted before, it can be closed again, and is at exit.
        self._at_exit.cancel()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # The error of the loop is the one that counts; ours has been logged.
            self._close_quietly()

    def _check_usable(self) -> None:
        if self._closing:
            raise ConfigError(f"the Checkpointer of {self.root} is closed: make a new one")
        self._check_process()
