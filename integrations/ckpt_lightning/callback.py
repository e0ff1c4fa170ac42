"""The callback: what users write, and Lightning's hooks as calls of the parts beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from ckpt_core import ConfigError, OnError, Options
from ckpt_lightning import resume as resuming
from ckpt_lightning import tuning
from ckpt_lightning.by_deepspeed import (
    DeepSpeedDoors,
    DeepSpeedSession,
    choose_engine,
    saves_by_deepspeed,
)
from ckpt_lightning.checkpoint_io import StepIO
from ckpt_lightning.finding import STATE_KEY
from ckpt_lightning.in_front import Foremost
from ckpt_lightning.lengths import measure_again
from ckpt_lightning.loops import is_fast_dev_run
from ckpt_lightning.paths import Paths
from ckpt_lightning.ranking import Ranking
from ckpt_lightning.ranks import Ranks, warn_about_change
from ckpt_lightning.recorder import Recorder
from ckpt_lightning.session import Session
from ckpt_lightning.settings import checked_root, engine_options
from ckpt_lightning.sharded import loads_late
from ckpt_lightning.strategy import Doors, resume_together
from ckpt_lightning.texts import Teller, tell
from ckpt_lightning.traps import (
    StepCounter,
    begin_averaging,
    warn_about_finetuning,
    warn_about_loaders,
    warn_about_skipped_hooks,
)
from ckpt_lightning.triggers import Triggers, refuse_unknown


class AsyncCheckpoint(Paths, Checkpoint):
    """Saves the whole state of training behind it; run the script again, and it goes on from the newest step.

        trainer = Trainer(callbacks=[AsyncCheckpoint("ckpts", every_n_steps=50)])

    A run that was killed at any instant and is started again ends bit for bit as if it had never stopped:
    weights, optimizers, schedulers, generators, order of data. A save that fails is a warning, and training
    goes on. It stands in for ModelCheckpoint, and works beside one.

    With several ranks (DDPStrategy, FSDPStrategy, or ModelParallelStrategy with FSDP2), each of them
    writes its share of one step, to a root that all of them see. Any number of ranks goes on from it; a
    warning says what cannot be exact. SIGTERM must reach all ranks. Under DeepSpeedStrategy the files are
    DeepSpeed's, saved by `ckpt_deepspeed`.

    Args:
        root: directory of this run's steps.
        every_n_steps: save at the multiples of this many optimizer steps (`trainer.global_step`).
        every_n_epochs: save after each of this many epochs. The default, if nothing else asks for saves: 1.
        train_time_interval: save when this much time (timedelta or seconds) has passed since the last save.
        policy: save when this policy of ckpt_core says so.
        monitor: name of a logged metric. Whenever it is validated, a state among the best is saved and kept.
        mode: whether the best has the smallest value ("min") or the largest ("max").
        save_top_k: how many of the best are kept, beside the newest `options.keep_last`; -1 keeps all. One
            that has given way to a better one goes once that is committed.
        save_last: save the state at the end of training, whatever was asked for.
        save_on_exception: when training fails, save the last whole step before. Costs a copy of all buffers
            at every step. Several ranks save it together or not at all. On SIGTERM the state is always saved.
        resume: "auto" goes on from the newest step in `root`; "never" insists that there is none. A
            `ckpt_path` given to `trainer.fit` wins over both.
        on_error: "warn" lets training go on when a save fails, "raise" ends it.
        trusted: load hyper-parameters that could run code, when resuming.
        levels: more roots, to which committed steps are taken behind training, and from which a run goes on
            whose root is empty; as `options.levels`. None: those, or what CKPT_CORE_LEVELS says.
        options: settings of the engine; `on_error` above takes the place of theirs.

    Raises:
        ConfigError: an argument is wrong; or, in `trainer.fit`, resume="never" and there are steps, or the
            monitored metric is not logged.
        RootBusy: in `trainer.fit`, another run writes to `root`.
        PersistError: in `trainer.fit`, `root` cannot be made or written to.
        StateMismatch: in `trainer.fit`, the steps in `root` are of another model.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] = "",
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | float | None = None,
        policy: Any = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        save_on_exception: bool = False,
        resume: Literal["auto", "never"] = "auto",
        on_error: OnError | str = OnError.WARN,
        trusted: bool = False,
        levels: Any = None,
        options: Options | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(unknown, AsyncCheckpoint.__init__)
        self.root = checked_root(root)
        if resume not in ("auto", "never"):
            raise ConfigError(f"resume={resume!r} is unknown: use 'auto' or 'never'")
        self.options = engine_options(options, on_error, levels)
        self.triggers = Triggers(
            every_n_steps, every_n_epochs, train_time_interval, policy, save_last, save_on_exception
        )
        self.triggers.schedule(monitors=False)
        self._ranking = Ranking(monitor, mode, save_top_k)
        self._resume_mode = resume
        self._trusted = trusted
        self._teller = Teller()
        self._recorder: Recorder | None = None
        self._counter: StepCounter | None = None
        self._front: Foremost | None = None
        self._resumed: dict[str, Any] | None = None
        self._kept: tuning.Resumed | None = None
        self.knows_root = False
        self._resumes_late = False
        self._unwanted: tuple[int, ...] = ()
        self._last_step: int | None = None

    # -- what Lightning and loggers ask a checkpoint callback -------------------------------------

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint: the same for subclasses, and whatever the root is.

        Two of them in one Trainer need different ones: override it in a subclass.
        """
        return STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        """Saved within every step, as of that step."""
        return {
            "monitor": self._ranking.monitor,
            "mode": self._ranking.mode,
            "kept": {**self._ranking.away, **self._ranking.kept},
            "current_score": self._ranking.current,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Called by Lightning when a run resumes."""
        recorder = self._recorder
        if recorder is None or state_dict["monitor"] != self._ranking.monitor:
            return
        checkpointer = recorder.session.checkpointer
        self._ranking.current = state_dict["current_score"]
        for step in self._ranking.restore(state_dict["kept"], existing=checkpointer.steps()):
            checkpointer.unpin(step)

    # -- begin -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install our CheckpointIO; for a fit, open the root and find the step to go on from."""
        ranks = Ranks(trainer, pl_module)
        self._as_tags = saves_by_deepspeed(trainer)
        if self._as_tags:
            choose_engine(trainer, self.options, monitor=self.monitor)
            DeepSpeedDoors(ranks).install()
        else:
            self._install_doors(trainer, pl_module, ranks)
        if stage != "fit" or is_fast_dev_run(trainer) or tuning.only_searches(trainer):
            return
        self.root = ranks.first(self.root)
        session = (DeepSpeedSession if self._as_tags else Session)(self.root, self.options, ranks)
        self._recorder = Recorder.of(session, self._ranking, self.triggers, self._teller)
        if isinstance(trainer.strategy.checkpoint_io, StepIO):
            trainer.strategy.checkpoint_io.opens(self._recorder)
        # A second fit of this process goes on with what the first has trained, if it has.
        self.knows_root = ranks.first(self.knows_root)
        if not self.knows_root:
            if self._resume_mode == "never":
                self._unwanted = session.steps()
            elif loads_late(trainer):
                self._resumes_late = True
            elif ranks.several or self.options.levels:
                self._last_step = self._resume_together(trainer, pl_module)
            else:
                self._last_step = resuming.resume_newest(trainer, pl_module, self.root)

    def _install_doors(self, trainer: Trainer, module: LightningModule, ranks: Ranks) -> None:
        base = trainer.strategy.checkpoint_io
        if not isinstance(base, StepIO):
            # The IO outlives a fit, and serves trainer.test(ckpt_path=...) after it.
            base = trainer.strategy.checkpoint_io = StepIO(
                base,
                # Those places are of this root, and of no other.
                options=replace(self.options, levels=(), events_file=None, metrics=None),
            )
        base.trusted = base.trusted or self._trusted
        base.ranks = ranks
        Doors(trainer, module, base, ranks).install()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning is loading a checkpoint, to go on from or to look at its weights."""
        resuming.load_in_double(trainer, pl_module, checkpoint)
        if self._recorder is None or tuning.loads_own_file(trainer):
            return
        self._resumed = self._recorder.load(trainer, checkpoint)
        if not loads_late(trainer):
            self._kept = tuning.kept(trainer, checkpoint)
        elif self._resumed is not None:  # on_fit_start is over
            tuning.forget_loaders(trainer)
            resuming.let_load(trainer)
            self._recorder.go_on(trainer, self._resumed)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loaders are made soon."""
        if self._recorder is None:
            return
        if not trainer.ckpt_path:  # Lightning tells it no earlier
            resuming.refuse_steps(self.root, self._unwanted)
        self._unwanted = ()
        if self._resumes_late:
            self._resumes_late = False
            self._last_step = self._resume_together(trainer, pl_module)
        tuning.after_search(trainer, self._kept)
        self._kept = None
        if self._resumed is None:
            self._recorder.position.fit_begins()
        else:
            resuming.let_load(trainer)
            self._recorder.go_on(trainer, self._resumed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first iterator stands."""
        if (recorder := self._recorder) is None:
            return
        recorder.session.ranks.check_optimizers()
        recorder.begin(trainer, resumed=self._resumed is not None)
        self._front = Foremost(self._epoch_begins, self._batch_begins)
        self._front.put(trainer)
        within_epochs = recorder.schedule.within_epochs
        warn_about_loaders(trainer, self._teller, within_epochs=within_epochs)
        if not pl_module.automatic_optimization:
            self._counter = StepCounter(recorder.before_update, self._teller)
            self._counter.watch(trainer.optimizers)
        if (saved := self._resumed) is not None:
            resuming.announce(trainer, saved, trainer.ckpt_path or self.root)
            warn_about_finetuning(trainer, self._teller)
            resuming.put_back(trainer, pl_module, saved)
            begin_averaging(trainer, pl_module, boundary=saved["boundary"])
            if not saved["boundary"]:
                warn_about_skipped_hooks(trainer, pl_module, self._teller)
            recorder.position.after_iterator(trainer, saved)
            measure_again(trainer)
            warn_about_change(trainer, saved, self._teller)

    # -- every epoch, every batch ----------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The epoch's order is drawn next."""
        if self._recorder is not None:
            measure_again(trainer)
            self._recorder.position.epoch_begins(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """The barrier: parameters are about to change."""
        if self._recorder is not None:
            self._recorder.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done, but for the module's own hook."""
        if (recorder := self._recorder) is None:
            return
        self._goes_on(trainer)
        self.knows_root = True
        if self._counter is not None:
            self._counter.check(trainer)
        self._hear(trainer)
        recorder.after_batch(trainer, pl_module, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averaged weights may be swapped in soon."""
        if self._recorder is not None and not trainer.sanity_checking:
            self._recorder.before_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The monitored metric is known."""
        if self._recorder is not None and not trainer.sanity_checking:
            self._recorder.after_validation(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Schedulers of the epoch are still to come."""
        if self._recorder is not None:
            self._recorder.after_epoch(trainer)

    # -- end -------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning moves the model away next: every snapshot must be out of it by then."""
        if self._recorder is not None:
            self._recorder.end(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Training failed, or was asked to end; Lightning calls nothing else any more."""
        if self._recorder is None:
            return
        try:
            self._recorder.fail(trainer, exception)
        except Exception as exc:
            tell(f"the state could not be saved on {type(exception).__name__}: {exc}")
        try:
            self._close(trainer)
        except Exception as exc:
            tell(f"a save failed: {exc}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait until everything is durable, and let the root go."""
        if stage != "fit" or self._recorder is None:
            return
        saved = self._resumed
        self.knows_root = saved is None or not resuming.trained_nothing(trainer, saved)
        self._close(trainer)

    # -- inside ----------------------------------------------------------------------------------

    def _epoch_begins(self, trainer: Trainer) -> None:
        """on_train_epoch_start, before any other callback's."""
        if (recorder := self._recorder) is None:
            return
        if self._resumed is not None and self._resumed["boundary"]:
            resuming.begin_epoch(trainer)
            recorder.position.at_boundary(trainer, self._resumed)
        else:
            recorder.between_epochs(trainer)

    def _batch_begins(self, trainer: Trainer) -> None:
        """on_train_batch_start, before any other callback's."""
        if self._recorder is not None:
            self._goes_on(trainer)
            self._recorder.before_batch(trainer)

    def _goes_on(self, trainer: Trainer) -> None:
        """A run that has resumed has its first batch: of one that is None, only the end is told."""
        if self._resumed is None:
            return
        if self._resumed["stepped"] is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._resumed["stepped"]
        # Lightning would leave plateau schedulers out at the end of the resumed epoch, since it does not
        # save the metric that they need; we do.
        trainer.fit_loop._restarting = False
        self._resumed = None

    def _resume_together(self, trainer: Trainer, pl_module: LightningModule) -> int | None:
        assert self._recorder is not None
        session = self._recorder.session
        if self._as_tags:
            return DeepSpeedDoors(session.ranks).resume(self.root)
        return resume_together(session.checkpointer, trainer, pl_module, trusted=self._trusted)

    def _close(self, trainer: Trainer) -> None:
        recorder = self._recorder
        assert recorder is not None
        if self._counter is not None:
            self._counter.close()
        if self._front is not None:
            self._front.take_away(trainer)
        try:
            recorder.close()
        finally:
            if isinstance(trainer.strategy.checkpoint_io, StepIO):
                trainer.strategy.checkpoint_io.closes(recorder)
            self._hear(trainer)
            trainer._logger_connector._progress_bar_metrics.pop("ckpt", None)
            self._recorder = self._resumed = self._kept = self._counter = self._front = None
        rank_zero_info(f"checkpoints in {self.root}: {recorder.session.meter.summary()}")

    def _hear(self, trainer: Trainer) -> None:
        """What became of saves, and what they cost. Never blocks."""
        assert self._recorder is not None
        session = self._recorder.session
        session.poll(on_committed=self._committed, on_failed=self._ranking.undo)
        session.show(trainer)

    def _committed(self, step: int, path: Path) -> None:
        self._last_step = max(step, self._last_step or 0)
