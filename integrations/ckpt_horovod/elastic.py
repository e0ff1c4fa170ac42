"""`TorchState`: Horovod's elastic state, whose commits are durable.

    state = TorchState(model=model, optimizer=opt, root="ckpts", epoch=0, batch=0)     # no collective

    @hvd.elastic.run
    def train(state): ... state.commit() ...

    sync() ---> train: commit(), commit(), ... ---> close()
       ^               |
       |               +-- ranks were lost:    restore()    what cannot be finished is given up
       |               +-- hosts have changed: commits that are under way become durable
       |               v
       +------- Horovod ends and begins anew, with other ranks; on_reset()

A Checkpointer lives from one `sync` to the next reset, since its ranks are those of one Horovod world. What
`sync` does is what the first rank says: all reload the newest step, or all take the first rank's live state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import state as stock
from torch import nn

from ckpt_core import (
    Checkpointer,
    CkptError,
    CommitError,
    ConfigError,
    CoordinationTimeout,
    Options,
    RestoreError,
    StoreOptions,
)
from ckpt_horovod.elastic_parts import Parts, Standing, tell
from ckpt_horovod.elastic_settings import Settings, check_names, checked_optimizer

_log = logging.getLogger("ckpt_horovod")

_MOST_LOSSES = 3
"""So often in a row ranks may be lost while they meet; then it is no loss, but something that is wrong."""


class TorchState(stock.TorchState):  # type: ignore[misc]
    """Horovod's elastic `TorchState`, whose `commit` is a durable checkpoint, made behind training.

    Made on every worker after `hvd.init()`. It does nothing together with other workers, so new ones may be
    made at any time. Used by the function that `hvd.elastic.run` wraps. End it by `close()`, or by a `with`
    block; where that is forgotten, what is in flight is finished when the process exits.

    Args:
        model: as for Horovod.
        optimizer: made by `ckpt_horovod.DistributedOptimizer(..., checkpointer=None)`.
        root: directory of the checkpoints.
        options: of each Checkpointer, see `ckpt_core.Options`.
        roots: "shared": all ranks write to one root; "node": those of each machine to one of theirs.
        store_options: see `ckpt_core.StoreOptions`; by default a rank that is silent for 10 s is dead.
        per_rank: names of attributes, or paths such as "model.norm.running_mean", that belong to each rank
            alone in a checkpoint.
        trusted: allow objects that could run code when they are loaded.
        attributes: as for Horovod. What has `state_dict` and `load_state_dict` (schedulers, samplers, other
            models and optimizers) keeps its identity; anything else is a value, equal on all ranks.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        *,
        root: str | os.PathLike[str] | None = None,
        options: Options | None = None,
        roots: Literal["shared", "node"] = "shared",
        store_options: StoreOptions | None = None,
        per_rank: Iterable[str] = (),
        trusted: bool = False,
        **attributes: Any,
    ) -> None:
        self._iterations = checked_optimizer(optimizer)
        check_names(attributes)
        self._settings = Settings(root, options, roots, store_options, trusted)
        self._checkpointer: Checkpointer | None = None
        self._live = False
        self._durable = False
        self._was_reset = False
        self._losses = self._looks_put_off = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._iterations.forgive(self._is_of_others)
        super().__init__(model=model, optimizer=optimizer, **attributes)
        self._parts = Parts(self, self._iterations, per_rank)

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What saves now; another one after each reset. None before the first `sync`, and once closed."""
        return self._checkpointer

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is None or handler.value is value:
            object.__setattr__(self, name, value)
            return
        if name == "optimizer":
            raise ConfigError("optimizer= cannot be replaced: make another TorchState")
        super().__setattr__(name, value)
        self._parts.replaced(name, value)

    # -- while training ---------------------------------------------------------------------------

    def commit(self) -> None:
        """As Horovod's: `save`, then `check_host_updates`, on every rank; also where this one could not save.

        Raises:
            CkptError: as for both. Where hosts have changed, or a rank was lost, that is raised, and what
                failed the save is logged. So it is with what the `state_dict` of an attribute raises.
        """
        self._iterations.refuse_inside("commit()")
        failed: Exception | None = None
        try:
            self.save()
        except HorovodInternalError:  # of a collective: those of the other ranks fail too
            raise
        except Exception as exc:
            if self._checkpointer is None:
                raise
            failed = exc
        # Danger: ranks that could save are in this broadcast, or will be, and wait for one that could not.
        try:
            self.check_host_updates()
        except (HostsUpdatedInterrupt, HorovodInternalError):
            if failed is not None:
                _log.warning("the commit before this reset: %s", failed)
            raise
        if failed is not None:
            raise failed

    def save(self) -> None:
        """Start a durable checkpoint of everything as of now; called by `commit`, on every rank.

        Returns without waiting for the disk, unless `in_flight` checkpoints are under way. A commit that is
        cut short leaves the one before.

        Raises:
            ConfigError: called outside of the function that `hvd.elastic.run` wraps.
            CkptError: as for `Checkpointer.save`. That *another* rank could not save is only logged: if it
                is lost, Horovod says so soon.
        """
        if self._checkpointer is None:
            raise ConfigError(
                "this TorchState has no Checkpointer: commit inside the function that hvd.elastic.run wraps"
            )
        if self._durable:
            self._parts.drop_initial()
        self._iterations.commit({})

    def check_host_updates(self) -> None:
        """As Horovod's; called by `commit`. Before it raises, what is in flight becomes durable.

        Between the passes of a step (backward_passes_per_step), and between `synchronize()` and that step, it
        waits with that until the step is made: ranks that sync begin a step anew.

        Raises:
            ConfigError: called within `optimizer.iteration()`.
            HostsUpdatedInterrupt: hosts were added or removed. All ranks sync afterwards, also where
                Horovod would leave that out (hosts were only removed), since they need a Checkpointer.
        """
        self._iterations.refuse_inside("check_host_updates()")
        if self._durable:  # perhaps by every_n_steps=, without a commit
            self._parts.drop_initial()
        # Not in `commit`, which a step that was left out is not to keep from saving.
        if self._iterations.is_accumulating({}, reduced=True):
            self._tell_put_off()
            return
        self._looks_put_off = 0
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt as exc:
            self._leave()
            raise HostsUpdatedInterrupt(skip_sync=False) from exc

    # -- from one world to the next ---------------------------------------------------------------

    def restore(self) -> None:
        """Ranks were lost: give up what they cannot finish. Called by Horovod, on each survivor.

        What every rank had written is committed first; anything else ends within `dead_after`. The state is
        reloaded by the `sync` that follows; if nothing is durable, it is what it was at construction.
        """
        self._live = False
        self._iterations.use(None)
        self._leave()
        self._parts.forget_gradients()
        if self._durable:  # an object that the reload is to fill must stay where it is
            self._parts.drop_initial()
        self._parts.go_back()

    def on_reset(self) -> None:
        """As Horovod's; but after a loss, reset callbacks run in `sync`, on the state that is reloaded."""
        self._leave()
        if self._live:
            super().on_reset()
            return
        callbacks, self._reset_callbacks = self._reset_callbacks, []
        try:
            super().on_reset()
        finally:
            self._reset_callbacks = callbacks
        self._was_reset = True

    def sync(self) -> None:
        """Give all ranks one state, and a Checkpointer. Called by Horovod, on every rank of a new world.

        After a loss, and when a job starts, the state is that of the newest step in the root. Where hosts
        have changed without a loss, or there is no step, it is the first rank's.

        Raises:
            HorovodInternalError: a rank was lost meanwhile.
            RestoreError: as for `Checkpointer.restore`; or the steps that this job had are gone.
        """
        self._open()
        told: Standing = tell(self._parts.standing(live=self._live))
        reloaded = not told.live and self._reload()
        if not (reloaded or told.live or told.initial):
            raise RestoreError(f"ranks were lost, and {self._settings.root} holds no step any more")
        if self._was_reset:
            for callback in self._reset_callbacks:
                callback()
        if not reloaded:
            self._parts.take_tensors(told)
        # After a reload too, for what the callbacks of the first rank have changed.
        self._parts.take_values(keep_own=reloaded)
        self._live, self._was_reset, self._losses = True, False, 0

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is in flight, within `timeout`, and unlock the root. Idempotent.

        Called on every rank when training is over. The State can be used again by `hvd.elastic.run`.

        Raises:
            CkptError: with on_error="raise", a commit failed in the background and was not reported yet.
        """
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._iterations.use(None)
        self._leave()

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._checkpointer is None:
            with self._finding_losses():
                made = self._settings.open()
            made.events.subscribe(self._note)
            self._checkpointer = made
            self._iterations.use(made)

    def _leave(self) -> None:
        """End the Checkpointer of this world; whatever goes wrong is logged."""
        try:
            self.close()
        except CkptError as exc:
            _log.warning("the last commits before this reset: %s", exc)

    def _reload(self) -> bool:
        """Take the newest step, on all ranks; False if there is none."""
        with self._finding_losses():
            found = self.optimizer.restore(trusted=self._settings.trusted)
        if found is None:
            return False
        self._parts.forget_gradients()
        self._parts.drop_initial()
        self._was_reset = self._was_reset or found.world_size != hvd.size()
        return True

    @contextmanager
    def _finding_losses(self) -> Iterator[None]:
        """A rank that is lost while ranks meet is lost for Horovod too."""
        try:
            yield
        except (CommitError, CoordinationTimeout) as exc:
            self._losses += 1
            if self._losses > _MOST_LOSSES:
                raise
            # Horovod begins anew without a word.
            _log.warning("ranks begin anew, since one was lost or late while they met: %s", exc)
            raise HorovodInternalError(str(exc)) from exc

    def _tell_put_off(self) -> None:
        """Warn, once, where no look is behind a step: a loop with one there puts off fewer in a row."""
        self._looks_put_off += not self._host_messages.empty()
        wrapped = self.optimizer._tree.wrapped({})
        if self._looks_put_off == max(one.backward_passes_per_step for one in wrapped):
            _log.warning(
                "hosts have changed, and each look for that since then came between the passes of a step "
                "(backward_passes_per_step), where it waits: call check_host_updates() or commit() "
                "behind step()"
            )

    def _is_of_others(self, error: CkptError) -> bool:
        """Whether a save failed for what happened to another rank, and to this one not.

        Nothing but HorovodInternalError may end training then: any other error would end this worker too.
        """
        if self._checkpointer is None:  # the end: nobody else tells
            return False
        if isinstance(error, CommitError):
            return bool(error.failures) and self._checkpointer.rank not in error.failures
        return isinstance(error, CoordinationTimeout)

    def _note(self, event: Any) -> None:
        # In a background thread; what follows from it is left to the training thread.
        self._durable = self._durable or event.name == "committed"
