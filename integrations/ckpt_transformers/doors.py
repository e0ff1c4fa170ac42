"""Methods of one Trainer that ours stand in for: where it saves, and where it reads what it saved.

Trainer calls them itself, in this order; what is not named here is Trainer's own:

    train                        opens the root, says what to go on from, closes the root
      _inner_training_loop       is told that this run goes on from something
        _init_training_state     restores, all at once, and lets Trainer read its TrainerState
        _prepare_for_training    has been done there
        _run_epoch               knows where the epoch begins and ends
          _load_rng_state        puts back generators
          _save_checkpoint       saves behind training
        _load_best_model         takes the best step

Why at these places: docs/adr/0033-trainer-doors.md.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ckpt_core import Checkpointer, ConfigError, RngState, TorchStore
from ckpt_transformers import settings
from ckpt_transformers.capture import EpochPlace, state_of, was_to_stop
from ckpt_transformers.files import step_named
from ckpt_transformers.run import Restored, Run, any_rank
from ckpt_transformers.texts import tell

if TYPE_CHECKING:
    from ckpt_transformers.callback import AsyncCheckpoint

_log = logging.getLogger("ckpt_core")
_NAMES = (
    *("train", "_inner_training_loop", "_init_training_state", "_prepare_for_training"),
    *("_run_epoch", "_load_rng_state", "_save_checkpoint", "_load_best_model"),
)


class Doors:
    """Stand in one Trainer. Made in `AsyncCheckpoint.attach`.

    Attributes:
        trainer: the one.
        run: the call of train() that runs, if one does.
        restored: the step that it goes on from.
    """

    def __init__(self, trainer: Trainer, callback: AsyncCheckpoint) -> None:
        self.trainer = trainer
        self._callback = callback
        self._own = {name: getattr(trainer, name) for name in _NAMES}
        self._step: int | None = None
        self._goes_on = False
        self._prepared: Any = None
        self._owed = False
        self.run: Run | None = None
        self.restored: Restored | None = None
        for name in _NAMES:
            setattr(trainer, name, getattr(self, name))

    @staticmethod
    def of(trainer: Trainer) -> Doors | None:
        """Those that stand in this Trainer; of a callback that was taken from it, they are taken away."""
        found = getattr(vars(trainer).get("train"), "__self__", None)
        if not isinstance(found, Doors) or found._is_wanted():
            return found if isinstance(found, Doors) else None
        found._leave()
        return None

    def _is_wanted(self) -> bool:
        return self._callback in self.trainer.callback_handler.callbacks

    def _leave(self) -> None:
        """Put Trainer's own back: whoever takes the callback from a Trainer has it save by itself."""
        for name, own in self._own.items():
            if vars(self.trainer).get(name) == getattr(self, name):
                setattr(self.trainer, name, own)
        self._callback._doors = None

    # -- begin and end ---------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **more: Any
    ) -> Any:
        """Trainer's own, with the root open. True means the newest whole step, or the begin without any.

        Raises:
            ConfigError: an argument of the Trainer cannot be kept; or it is not told to go on, and there are
                steps.
            SystemExit: SIGTERM has come: all is saved, and this process is to end, with status 0.
        """
        if not self._is_wanted():
            self._leave()
            return self._own["train"](resume_from_checkpoint, trial, **more)
        if trial is not None:
            raise ConfigError(
                "a search for hyper-parameters trains many runs, and a root is that of one: leave "
                "AsyncCheckpoint out"
            )
        settings.check_thread(self._callback.on_sigterm)
        settings.check(self.trainer)
        with self._open() as checkpointer:
            stock = self._choose(checkpointer, resume_from_checkpoint)
            self.run = run = Run(self.trainer, checkpointer)
            try:
                result = self._own["train"](stock, trial, **more)
            finally:
                self.run, self.restored, self._prepared = None, None, None
        run.poll()
        if run.stopping:
            raise SystemExit(0)
        return result

    def _open(self) -> Checkpointer:
        args = self.trainer.args
        callback = self._callback
        return Checkpointer(
            callback.root,
            settings.of_run(callback.options, args),
            coordination=TorchStore.from_process_group() if args.world_size > 1 else None,
            on_sigterm=callback.on_sigterm,
            sigterm_grace=callback.sigterm_grace,
        )

    def _choose(self, checkpointer: Checkpointer, asked: str | bool | None) -> str | None:
        """Note the step to go on from; a directory that Trainer wrote is Trainer's own business."""
        self._step, self._goes_on = None, False
        steps = checkpointer.steps()
        if asked is None or asked is False:
            _refuse_steps(checkpointer.root, steps)
            return None
        if asked is True:
            stock = self._stock_newest()
            self._goes_on = bool(steps) or bool(self._callback.options.levels)
            # Trainer loads its own directory before we restore: levels are asked first.
            if any_rank(self.trainer, self._goes_on and not steps and stock is not None):
                self._goes_on = checkpointer.restore({"trainer": ""}, only=["trainer"]) is not None
            if not self._goes_on and stock is not None:
                _log.info("no step in %s yet: going on from %s", self._callback.root, stock)
            return None if self._goes_on else stock
        path = Path(os.path.abspath(asked))
        if (path / TRAINER_STATE_NAME).is_file():
            return str(path)
        self._step, self._goes_on = _step_of(path, checkpointer.root), True
        return None

    def _stock_newest(self) -> str | None:
        """What Trainer wrote by itself, before this root was there."""
        output = str(self.trainer.args.output_dir)
        newest: Any = get_last_checkpoint
        return newest(output) if os.path.isdir(output) else None

    def _inner_training_loop(self, *args: Any, **named: Any) -> Any:
        if self._goes_on:
            named["resume_from_checkpoint"] = self._callback.root
        return self._own["_inner_training_loop"](*args, **named)

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        own = self._own["_init_training_state"]
        if not self._goes_on:
            return own(max_steps, updates, epochs, resume, trial)  # type: ignore[no-any-return]
        own(max_steps, updates, epochs, None, trial)
        # Trainer asks where the run stands before it makes what we restore. Neither needs the other.
        self._prepared = self._own["_prepare_for_training"](max_steps, None, None)[0]
        run = self._running
        self.restored = found = run.restore(self._step)
        if found is None:
            return 0, 0
        _log.info("resumed from step %d of %s", found.step, run.checkpointer.root)
        with tempfile.TemporaryDirectory() as folder:
            state = state_of(found.trainer)
            step = _best_named(state)
            if ours := self._best_path(step) is not None or not _is_stock(state):
                state.best_model_checkpoint = None
            state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
            stock: tuple[int, int] = own(max_steps, updates, epochs, folder, trial)
        if ours:
            # Also where its save failed: that is told of at the end.
            self.trainer.state.best_model_checkpoint = self._best_path(step, hoped=True)
        if found.imported:
            return stock
        RngState().load_state_dict(found.rng["now"])
        return self._position(stock, updates)

    def _position(self, stock: tuple[int, int], updates: int) -> tuple[int, int]:
        """The epoch and the batches of it that are done: as saved, unless epochs have another length now."""
        assert self.restored is not None
        place, loop = self._running.place, self.restored.loop
        args = self.trainer.args
        before = loop["world_size"], loop["accumulation"], place.length
        now = args.world_size, args.gradient_accumulation_steps, updates
        if before != now:
            tell(
                f"the run goes on with other batches (ranks, accumulation, steps of an epoch: {before} -> "
                f"{now}). Weights, optimizer and scheduler are exact; the rest of this epoch's data, and "
                f"generators, are Trainer's best guess",
                rank=self._running.checkpointer.rank,
            )
            return stock
        if place.boundary:
            return place.epoch + 1, 0
        return place.epoch, 0 if args.ignore_data_skip else place.updates * loop["accumulation"]

    def _prepare_for_training(self, max_steps: int, loader: Any, resume: str | None) -> Any:
        self._running.fetches.watch(loader)
        if self._prepared is None:
            return self._own["_prepare_for_training"](max_steps, loader, resume)
        model, self._prepared = self._prepared, None
        self.trainer.callback_handler.train_dataloader = loader
        return model, loader

    # -- an epoch --------------------------------------------------------------------------------

    def _run_epoch(self, *, epoch: int, **named: Any) -> None:
        trainer, run = self.trainer, self._running
        if trainer.state.global_step >= trainer.state.max_steps > 0 or self._was_stopped():
            trainer.control.should_training_stop = True  # Trainer would train one step too many
            return
        done = 0
        if epoch == named["epochs_trained"] and named["resume_from_checkpoint"] is not None:
            done = named["steps_trained_in_current_epoch"]
            self._put_back_epoch(done)
        updates = done // trainer.args.gradient_accumulation_steps
        run.epoch_begins(EpochPlace(epoch, updates, named["num_update_steps_per_epoch"]))
        self._owed = False
        self._own["_run_epoch"](epoch=epoch, **named)
        # With save_strategy="best" Trainer takes back the wish to save that SIGTERM was.
        if self._owed or (run.stopping and run.saved_step != trainer.state.global_step):
            whole = run.epoch_is_done or trainer.control.should_epoch_stop
            run.place = replace(run.place, boundary=whole)
            run.save()

    def _was_stopped(self) -> bool:
        """Whether early stopping, which counts on, had ended the run: Trainer forgets that as it begins."""
        found = self.restored
        if found is None or found.imported or found.step != self.trainer.state.global_step:
            return False
        callbacks: list[Any] = self.trainer.callback_handler.callbacks
        return was_to_stop(found.trainer) and any(
            each.early_stopping_patience_counter >= each.early_stopping_patience
            for each in callbacks
            if isinstance(each, EarlyStoppingCallback)
        )

    def left_epoch(self) -> bool:
        """Whether SIGTERM ends the run in the middle of an epoch."""
        return self._running.stopping and not self._running.epoch_is_done

    def _put_back_epoch(self, done: int) -> None:
        """Generators as they were when the epoch began; those of the step that was saved come later."""
        if self.restored is None or self.restored.imported:
            return
        saved = self.restored.rng
        RngState().load_state_dict(saved["epoch" if done else "now"])
        if done:
            fetches = self._running.fetches
            fetches.resume(yielded=done, drawn_from=saved["batch"], saved=saved["now"])

    def put_back_losses(self) -> None:
        """Losses of steps that were not logged yet. Called when training begins."""
        if self.restored is None:
            return
        trainer, loop = self.trainer, self.restored.loop
        trainer._tr_loss = loop["loss"].to(trainer.args.device)
        trainer._globalstep_last_logged = loop["last_logged"]
        # The mean that train() returns is that of its own steps.
        trainer._total_loss_scalar = -loop["loss"].item()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.restored is None:
            self._own["_load_rng_state"](checkpoint)
        elif self.restored.imported:
            self.restored.put_back_generators(self.trainer.args.process_index)
        else:
            self._running.fetches.put_back_rest()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the state behind training; at the end of an epoch, what belongs to the epoch comes first."""
        trainer, run = self.trainer, self._running
        state = trainer.state
        if state.best_global_step == state.global_step or state.best_global_step == run.best:
            state.best_model_checkpoint = self._best_path(state.best_global_step, hoped=True)
        ends = run.epoch_is_done or (
            trainer.control.should_epoch_stop
            or (trainer.control.should_training_stop and not run.stopping)
        )
        if ends:
            self._owed = True
        else:
            run.save()

    # -- the best --------------------------------------------------------------------------------

    def _best_path(self, step: int | None, *, hoped: bool = False) -> str | None:
        if not step:
            return None
        path = self._running.path_of(step)
        return str(path) if hoped or path.is_dir() else None

    def _load_best_model(self) -> None:
        state = self.trainer.state
        if self._running.stopping:
            self.settle_best()
        elif not self._is_in_root(state.best_model_checkpoint):
            self._running.checkpointer.wait_staged()  # the last step may still be read
            self._own["_load_best_model"]()
        elif not self._running.restore_best(step := _best_named(state) or 0):
            before = self._running.best_kept
            kept = f". Step {before} is kept, the best that was" if before else ""
            tell(
                f"the best step, {step}, was not saved: the model stays as it was last{kept}",
                rank=self._running.checkpointer.rank,
            )
            self.settle_best()

    def settle_best(self) -> None:
        """Name the best step that is there, or none: at its end Trainer compares directories with it.

        Called when no save is in flight any more.
        """
        state, run = self.trainer.state, self._running
        run.poll()
        path = state.best_model_checkpoint
        if self._is_in_root(path) and not os.path.isdir(str(path)):
            state.best_model_checkpoint = self._best_path(run.best_kept)

    def _is_in_root(self, path: str | None) -> bool:
        return Path(str(path)).parent == self._running.checkpointer.root

    @property
    def _running(self) -> Run:
        if self.run is None:
            raise ConfigError("AsyncCheckpoint saves and restores during trainer.train() alone")
        return self.run


def _refuse_steps(root: Path, steps: tuple[int, ...]) -> None:
    """Raises ConfigError when a root that should be empty holds steps."""
    if steps:
        held = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        raise ConfigError(
            f"train() begins anew, and {root} holds {held} (newest {steps[-1]}): they would be mixed with "
            f"those of this run. Call train(resume_from_checkpoint=True) to go on, or choose another root"
        )


def _is_stock(state: TrainerState) -> bool:
    """Whether the best step is a directory that Trainer wrote, before this root was there."""
    best = state.best_model_checkpoint
    return best is not None and os.path.isfile(os.path.join(best, TRAINER_STATE_NAME))


def _best_named(state: TrainerState) -> int | None:
    """The best step of those that were to be saved: an evaluation may have been better at another one."""
    named = step_named(os.path.basename(str(state.best_model_checkpoint)))
    return state.best_global_step if named is None else named


def _step_of(path: Path, root: Path) -> int | None:
    """The step of this root that a path names; None for the root itself: the newest."""
    home = os.path.realpath(root)  # either may be named through a link
    if os.path.realpath(path) == home:
        return None
    named = step_named(path.name)
    if named is None or os.path.realpath(path.parent) != home:
        raise ConfigError(
            f"resume_from_checkpoint={str(path)!r} is neither a step of {root} nor a directory that Trainer "
            f"wrote: give True for the newest step, or one of its directories"
        )
    return named
