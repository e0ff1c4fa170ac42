"""The callback: what users write, and how it finds the Trainer that it is of."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ckpt_core import ConfigError, OnError, Options
from ckpt_transformers.doors import Doors
from ckpt_transformers.settings import checked_root, engine_options

_TERMINAL = (PrinterCallback, ProgressCallback)
_GIVEN = (
    *("model", "processing_class", "optimizer", "lr_scheduler"),
    *("train_dataloader", "eval_dataloader"),
)
"""What Trainer hands to every callback."""


class AsyncCheckpoint(TrainerCallback):
    """Saves behind training whatever Trainer would save, whenever it would; `train(True)` goes on from there.

        trainer = Trainer(..., callbacks=[AsyncCheckpoint("ckpts")])
        trainer.train(resume_from_checkpoint=True)  # the newest whole step; the begin, if there is none

    TrainingArguments say when to save and how many steps stay (`save_strategy`, `save_steps`,
    `save_total_limit`, `load_best_model_at_end`), as ever. A run that was killed at any instant and is
    started again ends bit for bit as if it had never stopped. Trainer writes no `checkpoint-*` directories.

    With several ranks, each of them writes its share of one step, to a root that all of them see.

    Args:
        root: directory of this run's steps.
        on_error: "warn" lets training go on when a save fails, "raise" ends it.
        on_sigterm: "save" saves the step that was reached when SIGTERM comes, and ends the process with
            status 0; None leaves the signal alone.
        sigterm_grace: how long after SIGTERM the process may live on (timedelta or seconds).
        levels: more roots, to which committed steps are taken behind training, and from which a run goes on
            whose root is empty; as `options.levels`. None: those, or what CKPT_CORE_LEVELS says.
        options: settings of the engine. `save_total_limit` wins over its `keep_last`; with neither, all steps
            stay.

    Raises:
        ConfigError: an argument is wrong; or, in `train`, an argument of the Trainer cannot be kept.
        RootBusy: in `train`, another run writes to `root`.
        PersistError: in `train`, `root` cannot be made or written to.
        StateMismatch: in `train`, the steps in `root` are of another model.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        on_error: OnError | str = OnError.WARN,
        on_sigterm: Literal["save"] | None = "save",
        sigterm_grace: timedelta | float = 30.0,
        levels: Any = None,
        options: Options | None = None,
    ) -> None:
        if on_sigterm not in (None, "save"):
            raise ConfigError(f"on_sigterm={on_sigterm!r} is unknown: use 'save' or None")
        self.root = checked_root(root)
        self.on_sigterm: Literal["save"] | None = on_sigterm
        self.sigterm_grace = sigterm_grace
        self.options = engine_options(options, on_error, levels)
        self._doors: Doors | None = None

    def attach(self, trainer: Trainer) -> None:
        """Stand in this Trainer; for those who add the callback to one that is made already. Idempotent.

        Raises:
            ConfigError: it stands in another Trainer, or another one in this.
        """
        if self._doors is not None:
            Doors.of(self._doors.trainer)  # which lets go where it was taken out
        if self._doors is not None:
            if self._doors.trainer is not trainer:
                raise ConfigError(
                    "an AsyncCheckpoint is that of one Trainer: make another one for this"
                )
            return
        if Doors.of(trainer) is not None:
            raise ConfigError(
                "one Trainer has two AsyncCheckpoints, and one of them alone would save: leave one out; "
                "levels=[...] is for further roots"
            )
        self._doors = Doors(trainer, self)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)

    def wait_staged(self) -> None:
        """Wait until no save reads weights any more: they may be changed then by something else than a step.

        For callbacks that do so, as one that puts averaged weights in for a save. Called on the training
        thread of each rank; returns at once where nothing is in flight.

        Raises:
            CkptError: as `Checkpointer.wait_staged`.
        """
        if self._doors is not None and self._doors.run is not None:
            self._doors.run.checkpointer.wait_staged()

    # -- hooks, in their order -------------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer is made; it calls this itself."""
        trainer = _calling_trainer(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training begins, from what was restored or from nothing."""
        if self._doors is None or self._doors.run is None:
            raise ConfigError(
                "AsyncCheckpoint does not know its Trainer: pass it in Trainer(callbacks=[...]), or call "
                "attach(trainer) before train()"
            )
        self._doors.run.gather_files()
        self._doors.put_back_losses()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The batches of a step are there; Trainer tells the optimizer, and goes forward and backward."""
        assert self._doors is not None and self._doors.run is not None
        self._doors.run.await_staged()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """An optimizer step is done; logging, evaluation and the save of it are to come."""
        assert self._doors is not None and self._doors.run is not None
        run = self._doors.run
        run.place = replace(run.place, updates=run.place.updates + 1)
        run.poll()
        self._report_costs(state, control)
        if self.on_sigterm is not None and run.hear_of_stop():
            control.should_training_stop = control.should_save = True
        if not control.should_save:
            run.prepare()
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The epoch is over, or was left by SIGTERM: then the run that goes on will come to its end."""
        assert self._doors is not None and self._doors.run is not None
        self._doors.run.epoch_ends(early=control.should_training_stop)
        self._doors.run.await_staged()  # Trainer tells the optimizer of an evaluation that is to come
        if self._doors.left_epoch():
            control.should_log = control.should_evaluate = control.should_save = False
        return control

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Figures go out. Those of the whole run are the last that reporters hear: of the last save, too."""
        if (
            self._doors is not None
            and self._doors.run is not None
            and "train_runtime" in kwargs["logs"]
        ):
            self._doors.run.checkpointer.wait()
            self._report_costs(state, control)
            if not args.load_best_model_at_end:
                self._doors.settle_best()

    # -- inside ----------------------------------------------------------------------------------

    def _report_costs(self, state: TrainerState, control: TrainerControl) -> None:
        """Tell reporters what saves have cost that were committed since; neither history nor terminal."""
        assert self._doors is not None and self._doors.run is not None
        handler: Any = self._doors.trainer.callback_handler
        for cost in self._doors.run.meter.take():
            given = {name: getattr(handler, name) for name in _GIVEN}
            for other in handler.callbacks:
                if other is not self and not isinstance(other, _TERMINAL):
                    # Not by Trainer.log, nor by its handler: they write history, and forget a wish to log.
                    logs = cost.as_metrics()
                    other.on_log(self._doors.trainer.args, state, control, logs=logs, **given)


def _calling_trainer(callback: AsyncCheckpoint) -> Trainer | None:
    """The Trainer that calls `on_init_end`: it hands itself to no callback, and is the caller's caller."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    return None
