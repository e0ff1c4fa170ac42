"""One call of `Trainer.train`: its Checkpointer, what it saves, and what it goes on from."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from ckpt_core import (
    Checkpointer,
    CkptError,
    Meter,
    NotCommitted,
    OnError,
    RngState,
    SaveHandle,
    StateMismatch,
    step_path,
)
from ckpt_transformers.capture import PRIVATE, EpochPlace, Kept, dump, live, optimizer_of
from ckpt_transformers.fetching import Fetches
from ckpt_transformers.files import small_files
from ckpt_transformers.texts import tell


@dataclass(frozen=True)
class Restored:
    """A step that training goes on from, beside what was filled in place.

    Attributes:
        step: its number.
        trainer: TrainerState as text.
        loop, rng: as `capture.dump` has them, or as `ckpt-core import` has made them.
    """

    step: int
    trainer: str
    loop: dict[str, Any]
    rng: dict[str, Any]

    @property
    def imported(self) -> bool:
        """Whether Trainer saved it by itself: then all goes on as after a directory of its own."""
        return bool(self.loop.get("imported"))

    def put_back_generators(self, rank: int) -> None:
        """Those of an imported step, if it has some of this rank; put back when Trainer would."""
        states = self.rng["ranks"]
        if rank < len(states):
            RngState().load_state_dict(states[rank])


class Run:
    """Made when training begins. Used on the training thread.

    Attributes:
        checkpointer: open; who made the run closes it.
        fetches: what the batches of the epoch were drawn from.
        stopping: SIGTERM has come, and all ranks know.
        saved_step: the newest step of which a save was begun.
        place: where training stands.
        meter: what saves cost.
    """

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self._trainer = trainer
        self.checkpointer = checkpointer
        self.meter = Meter()
        checkpointer.events.subscribe(self.meter.on_event)
        self.fetches = Fetches()
        self._bests: list[int] = []
        self._let_go = 0
        self.stopping = False
        self.saved_step = 0
        self.place = EpochPlace(0, 0, 0)
        self._exhausted = False
        self._epoch_rng: dict[str, Any] = {}
        self._handles: list[SaveHandle] = []
        self._files: dict[str, torch.Tensor] = {}
        self._prepared = False

    # -- saving ----------------------------------------------------------------------------------

    def gather_files(self) -> None:
        """Once, before the first step: a tokenizer takes its time."""
        self._files = small_files(self._trainer)

    def epoch_begins(self, place: EpochPlace) -> None:
        """Right before the loader is asked for an iterator."""
        self.place, self._exhausted = place, False
        self._epoch_rng = RngState().state_dict()

    def epoch_ends(self, *, early: bool) -> None:
        """Trainer has come to its end; `early`: because training is to stop, with data left or not."""
        self._exhausted = not early

    @property
    def epoch_is_done(self) -> bool:
        """Whether its last step is done. Data without a length shows at the epoch's end alone."""
        return self._exhausted or self.place.updates >= self.place.length

    def prepare(self) -> None:
        """Once, when the optimizer has its state: the first save finds memory that is page-locked."""
        if self._prepared or self.saved_step or not _on_device(self._trainer):
            return
        self._prepared = True
        # What is wrong, the first save tells.
        with suppress(CkptError):
            tree = self._tree(self.best, self._best_before)
            self.checkpointer.prepare(tree, per_rank=self._private)

    def save(self) -> None:
        """Start a save of the step that was reached; what cannot be saved is a warning, or raised.

        Raises:
            CkptError: with on_error="raise", this save or an earlier one failed.
        """
        trainer, began = self._trainer, time.monotonic()
        trainer.store_flos()
        step, mine = trainer.state.global_step, self._best_of(trainer.state.best_global_step)
        tree = self._tree(*mine)
        self.saved_step = step
        try:
            with self.meter.saving(step, began_s=began):
                handle = self.checkpointer.save(step, tree, per_rank=self._private)
        except CkptError as exc:
            self._failed(step, exc)
            return
        handle.committed.add_done_callback(lambda done: self._settle(done, *mine))
        self._handles.append(handle)

    def poll(self) -> None:
        """Hear what became of saves; never blocks. With on_error="raise", the next save raises."""
        done = [handle for handle in self._handles if handle.committed.done()]
        for handle in done:
            self._handles.remove(handle)
            error = handle.committed.exception()
            if error is None:
                continue
            self._forget_best(handle.step)
            if not self._raises:
                self._tell_failure(handle.step, error)

    def await_staged(self) -> None:
        """Right before weights may change without a step of the optimizer, which would wait by itself."""
        optimizer = optimizer_of(self._trainer)
        # Schedule-free ones swap weights in train() and eval(), which Trainer calls; LOMO steps in backward.
        swaps = any(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        if swaps or self._trainer.accelerator.has_lomo_optimizer:
            self.checkpointer.wait_staged()

    def hear_of_stop(self) -> bool:
        """Whether any rank was asked to stop. Called on every rank after the same step: a collective."""
        asked = any_rank(self._trainer, self.checkpointer.stop_requested)
        self.stopping = self.stopping or asked
        return self.stopping

    # -- restoring -------------------------------------------------------------------------------

    def restore(self, step: int | None) -> Restored | None:
        """Fill model, optimizer, scheduler and scaler from this step, or the newest that is whole."""
        loop_of, rng_of = Kept(), Kept()
        tree = {**live(self._trainer), "trainer": "", "loop": loop_of, "rng": rng_of}
        try:
            found = self.checkpointer.restore(tree, step=step, only=list(tree))
        except StateMismatch:
            if tree.pop("scaler", None) is None:
                raise
            # Of a run without one, it begins anew, as under Trainer alone; what else differs is raised again.
            found = self.checkpointer.restore(tree, step=step, only=list(tree))
        if found is None:
            return None
        for skipped, why in found.skipped:
            self._tell(f"step {skipped} is not whole, going back to the next older one: {why}")
        loop = loop_of.value
        self.place = EpochPlace(loop["epoch"], loop["updates"], loop["length"], loop["boundary"])
        self._bests = [step for step in (loop["best_before"], loop["best"]) if step]
        if self.best < found.step:
            # The pin was let go as the best was committed: one that is there since is somebody's own.
            self._let_go = self._best_before
        self._settle_pins(self.best, self._best_before)
        self.meter.resumed(found.step)
        return Restored(found.step, found.state["trainer"], loop, rng_of.value)

    def restore_best(self, step: int) -> bool:
        """Fill the model from this step; False where it is not there."""
        self.checkpointer.wait()
        self.poll()
        try:
            self.checkpointer.restore({"model": self._trainer.model}, step=step, only=["model"])
        except NotCommitted:
            return False
        return True

    def path_of(self, step: int) -> Path:
        """Its directory, whether it is there or not."""
        return step_path(self.checkpointer.root, step)

    @property
    def best(self) -> int:
        """The step that has the best metric of those that are saved, or are being saved; 0 for none."""
        return self._bests[-1] if self._bests else 0

    @property
    def best_kept(self) -> int:
        """The best step that is there, once none is in flight; 0 for none."""
        there = (step for step in reversed(self._bests) if self.path_of(step).is_dir())
        return next(there, 0)

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _best_before(self) -> int:
        return self._bests[-2] if len(self._bests) > 1 else 0

    @property
    def _several(self) -> bool:
        return self.checkpointer.world_size > 1

    @property
    def _raises(self) -> bool:
        return self.checkpointer.options.on_error is OnError.RAISE

    @property
    def _private(self) -> tuple[str, ...] | None:
        return PRIVATE if self._several else None

    def _tree(self, best: int, before: int) -> dict[str, Any]:
        """What a save holds, as of now."""
        rng = {"epoch": self._epoch_rng, "batch": self._drawn_from()}
        steps = {"best": best, "best_before": before}
        tree = dump(self._trainer, self.place, rng=rng, best=steps)
        return {**tree, "files": self._files}

    def _drawn_from(self) -> dict[str, Any] | None:
        if self.place.boundary:
            return None
        per_update: int = self._trainer.args.gradient_accumulation_steps
        return self.fetches.state(yielded=self.place.updates * per_update)

    def _best_of(self, best: int | None) -> tuple[int, int]:
        """The best step as of this save, and the one before it."""
        step = self._trainer.state.global_step
        if best == step and self.best != step:
            self._bests.append(step)
        return self.best, self._best_before

    def _forget_best(self, step: int) -> None:
        """The save of it failed: whoever gave way to it is back."""
        if step in self._bests:
            self._bests.remove(step)

    def _settle(self, done: Future[Path], best: int, before: int) -> None:
        """Runs where the engine commits, before it can commit the next step and retire this one."""
        if done.exception() is None:
            self._settle_pins(best, before)

    def _settle_pins(self, best: int, before: int) -> None:
        try:
            if best:
                try:
                    self.checkpointer.pin(best)
                except NotCommitted:
                    return  # its save failed, so that the one before it is the best that is there
            # Once: somebody may have pinned it again since.
            if before and before not in (best, self._let_go):
                self.checkpointer.unpin(before)
                self._let_go = before
        except CkptError as exc:
            self._tell(f"the best step could not be marked, so retention may take it: {exc}")

    def _failed(self, step: int, exc: CkptError) -> None:
        self._forget_best(step)
        if self._raises:
            raise exc
        self._tell_failure(step, exc)

    def _tell_failure(self, step: int, error: BaseException) -> None:
        self._tell(
            f"the save of step {step} failed, and training goes on (on_error='raise' would end it): {error}"
        )

    def _tell(self, text: str) -> None:
        tell(text, rank=self.checkpointer.rank)


def any_rank(trainer: Trainer, mine: bool) -> bool:
    """Whether it is so on any rank. Called on every rank: a collective."""
    if trainer.args.world_size < 2:
        return mine
    flag = torch.tensor(int(mine), device=trainer.args.device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def _on_device(trainer: Trainer) -> bool:
    # In host memory nothing is page-locked, and the pages of a first save need not be there before it.
    return trainer.args.device.type != "cpu"
