"""One fit's use of the engine: saves, barriers, what becomes of saves, and what is told about them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from ckpt_core import Checkpointer, CkptError, Meter, Options, SaveHandle
from ckpt_lightning.ranking import Change
from ckpt_lightning.ranks import Ranks
from ckpt_lightning.texts import tell


class Session:
    """Owns the Checkpointer of one fit. Used on the training thread; must be closed.

    Args:
        root: where steps go.
        options: of the engine; `on_error` says whether a failed save ends training.
        ranks: those that train together.

    Raises:
        RootBusy, PersistError, ConfigError: as `Checkpointer`.
    """

    def __init__(self, root: str | os.PathLike[str], options: Options, ranks: Ranks) -> None:
        self.ranks = ranks
        self.checkpointer = self._opened(Path(root), options)
        self.meter = Meter()
        self._raises = options.on_error == "raise"
        self._handles: dict[SaveHandle, Change] = {}
        self._unsubscribe = self.checkpointer.events.subscribe(self.meter.on_event)

    def steps(self) -> tuple[int, ...]:
        """Those that the root holds."""
        return self.checkpointer.steps()

    def prepare(self, tree: Any) -> None:
        """Make staging memory ready for such a tree, behind training; what is wrong, the first save tells."""
        with contextlib.suppress(CkptError):
            self.checkpointer.prepare(tree, per_rank=self.ranks.private(tree))

    def save(self, step: int, tree: Any, *, change: Change, began: float) -> bool:
        """Start a save; whether it started, and with `blocking` whether it is committed.

        Args:
            began: when its capture began (monotonic clock).

        Raises:
            CkptError: with on_error="raise", this save or an earlier one failed.
        """
        try:
            with self.meter.saving(step, began_s=began):
                handle = self._start(step, tree)
        except CkptError as exc:
            self._failed(step, exc)
            return False
        handle.committed.add_done_callback(lambda done: self._settle_pins(done, change))
        self._handles[handle] = change
        return True

    def wait_staged(self) -> None:
        """The barrier: returns when training may change what saves still read.

        Raises:
            StagingError: with on_error="raise", not within the engine's `timeout`.
        """
        if all(handle.staged.done() for handle in self._handles):
            return
        try:
            self.checkpointer.wait_staged()
        except CkptError as exc:
            # Safe to go on: a save that outlives `timeout` has been given up.
            self._failed(next(reversed(self._handles)).step, exc)

    def poll(
        self, *, on_committed: Callable[[int, Path], None], on_failed: Callable[[int, Change], None]
    ) -> None:
        """Hear what became of saves; never blocks. With on_error="raise", the next save raises."""
        for handle in [handle for handle in self._handles if handle.committed.done()]:
            change = self._handles.pop(handle)
            error = handle.committed.exception()
            if error is None:
                on_committed(handle.step, handle.committed.result())
                continue
            on_failed(handle.step, change)
            if not self._raises:
                tell(_failure_text(handle.step, error))

    def show(self, trainer: Trainer) -> None:
        """Tell loggers what saves cost, and the progress bar which step is the newest."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for cost in self.meter.take():
            for logger in trainer.loggers:
                logger.log_metrics(cost.as_metrics(), step=step)
        if self.meter.newest is not None:
            # Not self.log: that would make a tensor on the device at every step.
            trainer._logger_connector._progress_bar_metrics["ckpt"] = float(self.meter.newest)

    def wait(self) -> None:
        """Block until nothing is in flight.

        Raises:
            CkptError: with on_error="raise", a save failed.
        """
        try:
            self.checkpointer.wait()
        except CkptError as exc:
            self._failed(None, exc)

    def close(self) -> None:
        """Finish what is in flight and let the root go. Idempotent.

        Raises:
            CkptError: with on_error="raise", a save failed and was not reported yet.
        """
        try:
            self.checkpointer.close()
        finally:
            self._unsubscribe()

    # -- inside ----------------------------------------------------------------------------------

    def _opened(self, root: Path, options: Options) -> Checkpointer:
        return self.ranks.open(root, options)

    def _start(self, step: int, tree: dict[str, Any]) -> SaveHandle:
        return self.checkpointer.save(step, tree, per_rank=self.ranks.private(tree))

    def _settle_pins(self, done: Future[Path], change: Change) -> None:
        """Runs where the engine commits, before it can commit the next step and retire this one.

        Order matters: what gives way goes once its successor is there, and is pinned.
        """
        if done.exception() is not None:
            return
        try:
            for step in change.pin:
                self.checkpointer.pin(step)
            for step in (*change.unpin, *change.unpin_away):
                self.checkpointer.unpin(step, retire=True)
        except CkptError as exc:
            tell(f"the best steps could not be marked, so retention may take them: {exc}")

    def _failed(self, step: int | None, exc: CkptError) -> None:
        if self._raises:
            raise exc
        tell(_failure_text(step, exc))


def _failure_text(step: int | None, error: BaseException) -> str:
    what = "a save" if step is None else f"the save of step {step}"
    return f"{what} failed, and training goes on (on_error='raise' would end it): {error}"
