"""Which state is saved when: one fit, hook by hook.

A state can be resumed exactly only if it is taken where nothing of a batch is still to come:

    after a batch        in on_train_batch_end, unless validation follows or the epoch ends
    after a validation   in on_validation_end, unless the epoch ends
    between two epochs   in the next on_train_epoch_start, before all callbacks, or in on_train_end

A module with an `on_train_batch_end` or `on_validation_end` of its own has not run it when callbacks do: then
loops and data are taken there, and the step is *pending* until tensors are taken too (`pending.Pending`):

    in the next on_train_batch_start, before all callbacks, or in on_train_epoch_end when training ends first
    in on_exception, when no batch comes: the loader has failed
    never, where a batch follows that is None, which only on_train_batch_end is told of: the step is pending
    anew behind that batch, or is taken behind the validation or the epoch that ends with it
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Self

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_core import ConfigError
from ckpt_lightning.by_hand import ByHand, complete
from ckpt_lightning.capture import (
    EXTRAS,
    Moment,
    Owned,
    after_batch,
    between_epochs,
    dump,
    early_part,
    frozen,
    merged,
    protected,
    within_stopped_epoch,
)
from ckpt_lightning.cut_short import NOTHING_SAVED, at_sigterm, rest_counts
from ckpt_lightning.in_front import changes_in
from ckpt_lightning.loops import (
    batch_ends_epoch,
    ends_here,
    logs_in_training,
    more_follows,
    on_device,
    swapping_optimizers,
)
from ckpt_lightning.pending import AFTER_BATCH, AFTER_VALIDATION, Pending, has_own
from ckpt_lightning.position import DataPosition
from ckpt_lightning.ranking import Change, Ranking
from ckpt_lightning.rescue import Armed, where_taken
from ckpt_lightning.resume import extras_of, own_buffers
from ckpt_lightning.session import Session
from ckpt_lightning.stopping import asked_to_stop, stops_again
from ckpt_lightning.texts import Teller
from ckpt_lightning.traps import updating_batch_norm
from ckpt_lightning.triggers import Schedule, Triggers

_NO_CHANGE = Change()


@dataclass
class Recorder:
    """Decides, captures and saves. Used on the training thread, by the callback's hooks.

    Attributes:
        last_step: the step that was saved last, or resumed from; 0 is the state before training.
    """

    session: Session
    position: DataPosition
    schedule: Schedule
    ranking: Ranking
    triggers: Triggers
    teller: Teller
    last_step: int = 0
    _seen_step: int = 0
    _score: float | None = None
    _pending: Pending | None = None
    _lends: bool = False  # what is armed refers to what optimizers own
    _prepared: bool = False
    _stops: bool = False
    _rest_counts: bool = False  # of a validation that is cut short

    @classmethod
    def of(cls, session: Session, ranking: Ranking, triggers: Triggers, teller: Teller) -> Self:
        """Of a fit that begins. Called on every rank: ranks agree on what decides."""
        schedule = triggers.schedule(monitors=ranking.monitor is not None)
        session.ranks.decide_alike(schedule)
        schedule.watch(session.checkpointer)
        triggers = session.ranks.possible(triggers, teller)
        return cls(session, DataPosition(teller), schedule, ranking, triggers, teller)

    def __post_init__(self) -> None:
        self.by_hand = ByHand(self.session.ranks.trainer, self.position, self.teller)
        self._armed = Armed(self._start_save)
        if self.triggers.save_on_exception:
            timeout_s = self.session.checkpointer.options.timeout_s
            self._armed = self.session.ranks.armed(self._start_save, timeout_s=timeout_s)

    # -- hooks, in their order -------------------------------------------------------------------

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """on_load_checkpoint: our part of it; None if Lightning wrote it by itself."""
        self.position.note(checkpoint)
        saved = extras_of(checkpoint)
        if saved is not None:
            self.by_hand.resumes(checkpoint)
        self._stops = saved is not None and stops_again(trainer, checkpoint, saved)
        return saved and {**saved, "buffers": own_buffers(trainer, checkpoint)}

    def go_on(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """on_fit_start, or on_load_checkpoint where that comes later. Called on every rank: a collective."""
        stops = trainer.strategy.reduce_boolean_decision(self._stops, all=False)
        trainer.should_stop = trainer.should_stop or stops
        self.position.before_loaders(saved)

    def begin(self, trainer: Trainer, *, resumed: bool) -> None:
        """on_train_start."""
        self.by_hand.begins()
        own_hook = has_own(AFTER_BATCH + AFTER_VALIDATION, trainer.lightning_module)
        self.position.watch(trainer, own_hook=own_hook)
        self._rest_counts = rest_counts(trainer)
        self._seen_step = trainer.global_step
        self.last_step = trainer.global_step if resumed else 0
        self.session.meter.resumed(trainer.global_step)

    def between_epochs(self, trainer: Trainer) -> None:
        """on_train_epoch_start, before any other callback's: everything of the epoch before is over."""
        score, self._score = self._score, None
        self._offer(trainer, between_epochs(trainer), score)
        if changes_in("on_train_epoch_start", trainer):
            self._before_own_hook()

    def before_batch(self, trainer: Trainer) -> None:
        """on_train_batch_start, before any other callback's: the module's own hook has run."""
        if self._pending is not None:
            self._save_pending(trainer)
            if changes_in("on_train_batch_start", trainer):
                self._before_own_hook()

    def before_update(self) -> None:
        """on_before_optimizer_step: the barrier."""
        self._armed.disarm()
        self.session.wait_staged()

    def after_batch(self, trainer: Trainer, module: LightningModule, batch_idx: int) -> None:
        """on_train_batch_end."""
        step = trainer.global_step
        own_hook = has_own(AFTER_BATCH, module)
        if step == self._seen_step:  # gradients are still being accumulated, or the batch was None
            if own_hook:
                self._before_own_hook()
            if (pending := self._dropped()) and not more_follows(trainer, batch_idx):
                moment = after_batch(trainer, owed="batch")
                self._pend(trainer, moment, due=pending.due, score=pending.score)
            return
        self._seen_step = step
        self.schedule.after_step(step)
        self._armed.disarm()
        if more_follows(trainer, batch_idx):
            return
        offer = self._offer_pending if own_hook else self._offer
        offer(trainer, after_batch(trainer, owed="batch"), None)

    def before_validation(self) -> None:
        """on_validation_start: averaged weights may be swapped in, buffers and metrics change."""
        self._dropped()  # a validation that was not foreseen
        self._armed.disarm()
        self.session.wait_staged()

    def after_validation(self, trainer: Trainer) -> None:
        """on_validation_end."""
        self._score = self._monitored(trainer)
        if not batch_ends_epoch(trainer, trainer.fit_loop.epoch_loop.batch_idx):
            score, self._score = self._score, None
            if not logs_in_training(trainer, self.ranking.monitor):
                self._insist(trainer, score)
            own_hook = has_own(AFTER_VALIDATION, trainer.lightning_module)
            offer = self._offer_pending if own_hook else self._offer
            offer(trainer, after_batch(trainer, owed="validation"), score)

    def after_epoch(self, trainer: Trainer) -> None:
        """on_train_epoch_end."""
        # Training ends within the epoch: there is no next batch, and what waits for it is saved here.
        self._save_pending(trainer)
        self.schedule.after_epoch(trainer.current_epoch + 1)
        if self._score is None and self.ranking.monitor is not None:
            self._score = self._monitored(trainer)
            if not trainer.enable_validation or trainer.fit_loop.epoch_loop.val_loop._has_run:
                self._insist(trainer, self._score)
        over = batch_ends_epoch(trainer, trainer.fit_loop.epoch_loop.batch_idx)
        if not over and ends_here(trainer):
            self._stopped_within(trainer)
        self.position.epoch_ends(trainer)

    def end(self, trainer: Trainer) -> None:
        """on_train_end."""
        self.schedule.wanted = self.schedule.wanted or self.triggers.save_last
        self._offer(trainer, between_epochs(trainer), self._score)
        self.by_hand.ends()
        self.session.wait_staged()

    def fail(self, trainer: Trainer, error: BaseException) -> None:
        """on_exception: save what can be resumed exactly."""
        self.session.wait_staged()
        if isinstance(error, SIGTERMException):
            if trainer.validating and self._rest_counts and self._is_new(trainer):
                return self.teller.once(NOTHING_SAVED)
            moment = at_sigterm(trainer)
            began = time.monotonic()
            pending, self._pending = self._pending, None
            if trainer.global_step and self._is_new(trainer):
                change = pending.change if pending else _NO_CHANGE
                self._save(trainer.global_step, self._dump(trainer, moment), began, change)
        else:
            pending = self._pending
            # Not one rank of several: another may have had the next batch, which was None.
            if pending and pending.is_whole(trainer) and not self.session.ranks.several:
                self._save_pending(trainer)
            self._dropped()
            self._armed.fail()

    def close(self) -> None:
        """Finish what is in flight, and let the root go. Idempotent.

        Raises:
            CkptError: as `Session.close`.
        """
        self.by_hand.closes()
        self.position.unwatch()
        self._armed.close()
        self.session.close()

    def save_now(self, checkpoint: dict[str, Any]) -> None:
        """trainer.save_checkpoint(root): this state, wherever training stands; durable at return."""
        if self._is_new(self.session.ranks.trainer):
            own = self.last_step
            tree, unfinished = self.by_hand.completed(checkpoint)
            self._save(checkpoint["global_step"], tree, time.monotonic())
            # One of our own may still come at this step, and takes its place: as one of the best, or since
            # this one lacks what is still to come.
            self.last_step = own
            self.schedule.wanted = self.schedule.wanted or unfinished
        self.session.wait()

    # -- inside ----------------------------------------------------------------------------------

    def _before_own_hook(self) -> None:
        """One comes next, and may change weights as a step does, without one: the barrier."""
        if self._lends:
            self._lends = False
            self._armed.outlast(lambda tree: frozen(tree, Owned(())))
        # Order matters: ranks that have just met may have started a save of what was held.
        self.session.wait_staged()

    def _offer_pending(self, trainer: Trainer, moment: Moment, score: float | None) -> None:
        """As `_offer`, where the module's own hook comes next, and may change this state."""
        due = self._is_best(score) or self._is_due(trainer)
        if (due or self.triggers.save_on_exception) and self._can_save(trainer):
            self._pend(trainer, moment, due=due, score=score)

    def _pend(self, trainer: Trainer, moment: Moment, *, due: bool, score: float | None) -> None:
        """Take all of this step but the tensors. Called in on_train_batch_end or on_validation_end."""
        # The ranking is part of what is taken.
        change = self._entered(trainer.global_step, score) if due else _NO_CHANGE
        # Schedulers are taken with the tensors, when none is owed any more.
        tree = self._dump(trainer, replace(moment, owed=""))
        early, fetch_rng = early_part(tree, Owned.of(trainer)), self.position.fetch_rng
        self._pending = Pending(trainer.global_step, early, due, fetch_rng, score, change)

    def _dropped(self) -> Pending | None:
        """The pending step, which is pending no more: a later state with its number is the one to save."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.schedule.wanted = self.schedule.wanted or pending.due
            self.ranking.undo(pending.step, pending.change)
        return pending

    def _save_pending(self, trainer: Trainer) -> None:
        """The pending step is whole: save it, or keep it at hand."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        # The module's own hook may have asked for it since.
        pending.early[EXTRAS]["stopping"] = asked_to_stop(trainer)
        pending.early[EXTRAS]["rng"] = self.position.rng_behind(pending.fetch_rng)  # and have drawn
        tree = merged(pending.early, dump(trainer))
        if pending.due:
            self._save(pending.step, tree, began, pending.change)
        else:
            self._arm(trainer, pending.step, tree)

    def _stopped_within(self, trainer: Trainer) -> None:
        """Training ends in this epoch, and nobody knew when its last batch ended: a later hook decided."""
        self.schedule.wanted = self.schedule.wanted or self.triggers.save_last
        self._offer(trainer, within_stopped_epoch(trainer), None)

    def _offer(self, trainer: Trainer, moment: Moment, score: float | None) -> None:
        """Save this state if it is wanted; else keep it at hand, if a failure should save it."""
        best, step = self._is_best(score), trainer.global_step
        if not self._can_save(trainer):
            return
        if best or self._is_due(trainer):
            began = time.monotonic()
            change = self._entered(step, score)
            self._save(step, self._dump(trainer, moment), began, change)
        elif self.triggers.save_on_exception:
            self._arm(trainer, step, self._dump(trainer, moment))
        self._prepare(trainer, moment)

    def _arm(self, trainer: Trainer, step: int, tree: dict[str, Any]) -> None:
        """Keep a whole step at hand, if a failure should save it."""
        # What such optimizers own changes before the next step: then it is copied as well.
        self._lends = not swapping_optimizers(trainer)
        owned = Owned.of(trainer) if self._lends else Owned(())
        self._armed.arm(step, frozen(tree, owned), where_taken(tree))

    def _prepare(self, trainer: Trainer, moment: Moment) -> None:
        """Once, when optimizers have their state: the first save finds memory that is page-locked."""
        if self._prepared or moment.boundary:
            return
        self._prepared = True
        if self._is_new(trainer) and on_device(trainer):
            self.session.prepare(self._dump(trainer, moment))

    def _monitored(self, trainer: Trainer) -> float | None:
        """The monitored value, of rank 0 if there are several; None if it is not logged."""
        score = self.ranking.score(trainer.callback_metrics)
        if self.ranking.monitor is None:
            return None
        score = self.session.ranks.first(score)
        self.ranking.current = self.ranking.current if score is None else score
        return score

    def _is_best(self, score: float | None) -> bool:
        # Rankings may differ for a moment, when a save has failed on one rank.
        return score is not None and self.session.ranks.first(self.ranking.would_keep(score))

    def _entered(self, step: int, score: float | None) -> Change:
        return _NO_CHANGE if score is None else self.ranking.enter(step, score)

    def _can_save(self, trainer: Trainer) -> bool:
        trained = trainer.global_step and not updating_batch_norm(trainer, self.teller)
        return bool(trained) and self._is_new(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        return self.schedule.wanted or (self.triggers.save_last and ends_here(trainer))

    def _is_new(self, trainer: Trainer) -> bool:
        return trainer.global_step != self.last_step

    def _dump(self, trainer: Trainer, moment: Moment) -> dict[str, Any]:
        return complete(dump(trainer), trainer, self.position, moment)

    def _save(
        self, step: int, tree: dict[str, Any], began: float, change: Change = _NO_CHANGE
    ) -> None:
        self._armed.disarm(saved=True)
        if not self._start_save(step, tree, began, change):
            self.ranking.undo(step, change)
        if swapping_optimizers(self.session.ranks.trainer):
            # The module may swap weights in its own hook, which comes next, and no barrier before it.
            self.session.wait_staged()

    def _start_save(
        self,
        step: int,
        tree: dict[str, Any],
        began: float | None = None,
        change: Change = _NO_CHANGE,
    ) -> bool:
        """Called on the training thread, or by `rescue` while that waits at the barrier."""
        began = time.monotonic() if began is None else began
        owned = Owned.of(self.session.ranks.trainer)
        limit = int(self.session.checkpointer.options.eager_leaf_bytes)
        tree = protected(tree, owned, above_bytes=limit)
        self.schedule.saved(step)
        self.last_step = step
        return self.session.save(step, tree, change=change, began=began)

    def _insist(self, trainer: Trainer, score: float | None) -> None:
        """Raises ConfigError when the monitored metric is not logged where it should have been."""
        if score is None and self.ranking.monitor is not None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            name = repr(self.ranking.monitor)
            raise ConfigError(
                f"monitor={name} was never logged, so no step can count as best (logged are: {known}). Call "
                f"self.log({name}, ...) in the module, in each epoch that is to count, or correct monitor=. "
                f"Steps that were saved are there"
            )
