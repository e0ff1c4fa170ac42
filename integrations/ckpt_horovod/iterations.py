"""The life of an iteration: what is saved of it, and when it ends.

    running --step()--> stepped --end(): explicit, or by the next zero_grad, step or forward--> running

Scheduler, scaler, random numbers and buffers are those of the end.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from horovod.common.exceptions import HorovodInternalError

from ckpt_core import Checkpointer, CkptError, ConfigError, NotCommitted, RestoredStep, SaveHandle
from ckpt_horovod.deciding import Decisions, Policy
from ckpt_horovod.layers import LayerSave, Layerwise
from ckpt_horovod.stepping import Stepper
from ckpt_horovod.tree import StateTree

_log = logging.getLogger("ckpt_horovod")

_AT_THE_END = "layers are enqueued at the end of the iteration from now on"
_LESS_MEMORY = (
    'layerwise="lazy" saves one shard at a time, for which less staging memory is enough.'
)


_CLOCK = itertools.count(1)
_SAVERS: WeakKeyDictionary[Checkpointer, weakref.ref[Iterations]] = WeakKeyDictionary()
"""Who has saved last by each Checkpointer. While it is open it holds him; weak, since he holds it too."""


class Iterations:
    """Counts the iterations of one optimizer, and saves those that are due; used on the training thread.

    Args:
        stepper: makes the steps.
        tree: what is saved.
        decisions: which iterations are.
        layerwise: see there.
        per_rank: paths of the tree that belong to each rank alone.
    """

    def __init__(
        self,
        stepper: Stepper,
        tree: StateTree,
        decisions: Decisions,
        *,
        layerwise: Layerwise,
        per_rank: tuple[str, ...],
    ) -> None:
        self.count = 0
        self.checkpointer: Checkpointer | None = None
        self._closed = self._told_closed = False
        self._stepper = stepper
        self._tree = tree
        self._decisions = decisions
        self._in_step = layerwise is Layerwise.IN_STEP
        self._per_rank = per_rank
        self._inside = self._went_back = False
        self._stepped = False
        self._ended_by: str | None = None
        self._used_at = self._stepped_at = 0
        self._late = False
        self._layered = self._prepares = False
        self._layers: LayerSave | None = None
        self._refused: CkptError | None = None
        self._forgives: Callable[[CkptError], bool] = lambda error: False

    def forgive(self, which: Callable[[CkptError], bool]) -> None:
        """Log these errors of saves instead of raising them: Horovod itself will tell of the lost rank."""
        self._forgives = which

    def use(self, checkpointer: Checkpointer | None) -> None:
        """Save by this one from now on; whatever was open of another one is forgotten."""
        self.checkpointer, self._closed = checkpointer, False
        self._used_at = next(_CLOCK)
        self._decisions.forget()
        self._layers, self._refused = None, None
        self._stepped, self._layered = False, False
        # Danger: what this one has gone through, a worker that is new has not, and all ask the same.
        self._went_back, self._ended_by, self._stepped_at = False, None, 0
        # Layers that are enqueued in the step need memory of another form.
        self._prepares = (
            checkpointer is not None and not self._in_step and self._tree.is_on_device()
        )
        if checkpointer is not None:
            self._stepper.sees_to_barrier(checkpointer)
            checkpointer.on_close(lambda: self._close(checkpointer))
            watch = getattr(self.policy, "watch", None)
            if watch is not None:
                watch(checkpointer, agree=False)  # the first rank alone is asked

    # -- a step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """See DistributedOptimizer: `step` of the wrapped optimizer."""
        try:
            self.end_implicitly("step()")
        except HorovodInternalError:  # the step would fail, too
            raise
        except Exception:
            # Told once the step is made: without it its all-reduces would be left, and training with them.
            self._make(closure)
            raise
        return self._make(closure)

    def _make(self, closure: Callable[[], Any] | None) -> Any:
        self._stepped_at = next(_CLOCK)
        # On every rank, before this one may wait for others: they may make this step in another way.
        self._decisions.ahead(self.count + 1)
        # Danger: not at the end of this iteration, which may be the last: a rank that leaves the job then
        # takes Horovod with it, and a broadcast that others begin would fail, or hang.
        self._decisions.ahead(self.count + 2)
        if self._layers is not None:
            # Its own copies would be torn by a second update.
            self._layers.spoil("step() was called twice in one iteration")
        checkpointer, result = self.checkpointer, None
        if checkpointer is None or not self._stepper.splits(closure):
            result = self._stepper.whole(checkpointer, closure)
        else:
            result = self._split(checkpointer)
        self._stepped, self._went_back, self._ended_by = True, False, None
        return result

    def _split(self, checkpointer: Checkpointer) -> Any:
        save = self._open_layers(checkpointer)
        if save is None and (self._stepper.is_hooked() or checkpointer.is_staged()):
            return self._stepper.whole(checkpointer, None)
        try:
            if save is not None and self._stepper.is_hooked():
                # Still layer-wise: other ranks may have no hooks, and all save one and the same layout.
                result = self._stepper.whole(checkpointer, None)
                save.stage(self._tree.layers())
                return result
            return self._stepper.in_layers(checkpointer, save)
        except BaseException:
            self._drop_layers()
            raise

    def _open_layers(self, checkpointer: Checkpointer) -> LayerSave | None:
        if self._layers is not None or not self._in_step or not self._stepper.reduces_in_step():
            return None
        if not self._decisions.is_due(self.count + 1):
            return None
        # Ranks that stage at the end save in the same form as those that do it in the step: one layout.
        self._layered = True
        if self._late or self._has_rival(checkpointer):
            return None
        try:
            self._layers = LayerSave(checkpointer, self.count + 1, self._tree)
        except CkptError as exc:
            if isinstance(exc, ConfigError) and checkpointer.options.pipelined:
                self._in_step, self._layered = False, False
                _log.warning("%s: %s", _AT_THE_END, exc)
                return None
            # Danger: with pipelined=False other ranks may have the memory that this one lacks. In another
            # form than theirs it would wait for them in vain.
            if isinstance(exc, ConfigError):
                exc.add_note(_LESS_MEMORY)
            # Raised at the end of the iteration: an exception in mid-step would leave half a step.
            self._refused = exc
        return self._layers

    # -- the end ---------------------------------------------------------------------------------

    @contextmanager
    def iteration(self, parts: Mapping[str, Any], *, save: bool | None) -> Iterator[None]:
        """The block is one iteration; it ends where the block does, unless by an exception."""
        if self._inside:
            raise ConfigError("iteration() is not to be nested: one block is one iteration")
        self.end_implicitly("iteration()")
        self._inside, self._went_back = True, False
        try:
            yield
        except BaseException:
            # What the block has done belongs to no iteration: nobody is to save it.
            self._drop_layers()
            self._stepped, self._layered = False, False
            refused, self._refused = self._refused, None
            if refused is not None:
                _log.warning("iteration %d could not be saved: %s", self.count + 1, refused)
            raise
        finally:
            self._inside = False
        self._tell_closed(save)
        self._end(parts, save=save)

    def end_implicitly(self, by: str) -> None:
        """The next iteration begins; called by what only a next iteration does."""
        if self._stepped and not self._inside:
            self._end({}, save=None)
            self._ended_by = by

    def end(self, parts: Mapping[str, Any], *, save: bool | None) -> SaveHandle | None:
        """See DistributedOptimizer: `end_iteration` of the wrapped optimizer."""
        if self._inside:
            raise ConfigError("end_iteration() inside iteration(): the block ends by itself")
        if self._ended_by is not None and not self._stepped:
            raise ConfigError(
                f"end_iteration() came after {self._ended_by} had ended the iteration: call it before, "
                f"or put the loop's body into `with opt.iteration():`"
            )
        self._tell_closed(save)
        return self._end(parts, save=save)

    def commit(self, parts: Mapping[str, Any]) -> SaveHandle | None:
        """Save the state of now as that of the last iteration, ended or not (elastic jobs).

        None: it failed for what happened to another rank, which was logged.
        """
        self.refuse_inside("commit()")
        if self._stepped:
            return self._end(parts, save=True)
        self._refuse_accumulating(self.is_accumulating(parts))
        return self._save(self.count, parts)

    def is_accumulating(self, parts: Mapping[str, Any], *, reduced: bool = False) -> bool:
        """Whether a step has some of its passes on some rank, or `reduced` gradients; asked on all ranks.

        Of this optimizer, or of another one that is saved with it.
        """
        return self._stepper.have_gradients(self._tree.wrapped(parts), reduced=reduced)

    def refuse_inside(self, call: str) -> None:
        """ConfigError within `iteration()`: what leaves the block by an exception would be trained twice."""
        if self._inside:
            raise ConfigError(f"{call} inside iteration(): call it after the block")

    @property
    def policy(self) -> Policy | None:
        """Which iterations are saved without being asked for."""
        return self._decisions.policy

    def keep_per_rank(self, paths: Iterable[str]) -> None:
        """These paths of the tree belong to each rank alone, too."""
        self._per_rank = (*self._per_rank, *paths)

    def _end(self, parts: Mapping[str, Any], *, save: bool | None) -> SaveHandle | None:
        went_back, self._went_back = self._went_back, False
        # What holds now is the step that it went back to, unless a pass of the next was made.
        if went_back and not self.is_accumulating(parts):
            return None
        step = self.count + 1
        # Asked in every case: on several ranks each question has its broadcast.
        due = self._decisions.is_due(step)
        stepped, self._stepped = self._stepped, False
        self.count, self._ended_by = step, None
        try:
            due = due or self._decisions.deferred
            # Danger: this may ask all ranks, of which one alone may save, have closed, or have refused.
            between = self._is_between_passes(parts, stepped=stepped)
            saves = self.checkpointer is not None and (due if save is None else save)
            if saves and between:
                self._decisions.defer(step, due=due)
                self._refuse_accumulating(bool(save) and self._refused is None)
                saves = False
            elif saves:
                self._decisions.deferred = False
            # What was refused in the step is told here in any case, and not by a later save.
            saves = self.checkpointer is not None and (saves or self._refused is not None)
            if not saves:
                self._prepare(parts)
            handle = self._save(step, parts) if saves else None
        finally:
            self._drop_layers()
            self._layered = False
            if not stepped:
                # Where Horovod is gone, the next step tells, if there is one.
                with suppress(HorovodInternalError):
                    self._decisions.ahead(step + 1)
        self._decisions.report()
        return handle

    def _is_between_passes(self, parts: Mapping[str, Any], *, stepped: bool) -> bool:
        """Whether what is accumulated would be missing in a checkpoint of now; the same on every rank."""
        # Of its own by steps alone: where the next step() ends this one, gradients of that are there.
        if self._stepper.accumulates and not stepped:
            return True
        return self._stepper.have_gradients(self._tree.wrapped(parts)[1:])

    def _refuse_accumulating(self, saves: bool) -> None:
        if saves:
            raise ConfigError(
                f"iteration {self.count} cannot be saved: gradients are being accumulated "
                f"(backward_passes_per_step), and are in no checkpoint. Save after step(), of each optimizer"
            )

    def _prepare(self, parts: Mapping[str, Any]) -> None:
        """Once, when the optimizer has its state: the first save finds memory that is page-locked."""
        if self._prepares and self.checkpointer is not None:
            self._prepares = False
            # What is wrong, the first save tells.
            with suppress(CkptError):
                self.checkpointer.prepare(self._tree.of(parts), per_rank=self._per_rank)

    def _save(self, step: int, parts: Mapping[str, Any]) -> SaveHandle | None:
        try:
            return self._start_save(step, parts)
        except CkptError as exc:
            if not self._forgives(exc):
                raise
            _log.warning("iteration %d was not saved, since a rank was lost: %s", step, exc)
            return None

    def _has_rival(self, checkpointer: Checkpointer) -> bool:
        """Whether another optimizer saves by it, and trains on: one that was made anew has none."""
        last = _SAVERS.get(checkpointer, lambda: None)()
        return last is not None and last is not self and last._stepped_at > self._used_at

    def _start_save(self, step: int, parts: Mapping[str, Any]) -> SaveHandle:
        assert self.checkpointer is not None
        self._prepares = False
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        if self._has_rival(self.checkpointer):
            raise ConfigError(
                f"iteration {step} is not saved: another wrapped optimizer saves by the same Checkpointer, "
                f"and each would replace the steps of the other. Give one of them the Checkpointer, attach "
                f"the others to it, and wrap those with checkpointer=None"
            )
        _SAVERS[self.checkpointer] = weakref.ref(self)
        tree = self._tree.of(parts)
        layers = self._layers
        if layers is not None:
            problem = layers.problem(parts)
            if problem is None:
                self._layers = None
                return layers.seal(tree, self._per_rank)
            self._drop_layers()
            self._late = True
            _log.warning("%s: %s", _AT_THE_END, problem)
        if self._layered:
            return LayerSave(self.checkpointer, step, self._tree).seal(tree, self._per_rank)
        return self.checkpointer.save(step, tree, per_rank=self._per_rank)

    def _drop_layers(self) -> None:
        layers, self._layers = self._layers, None
        if layers is not None:
            layers.abort()

    def _close(self, checkpointer: Checkpointer) -> None:
        if self.checkpointer is not checkpointer:
            return
        try:
            self.end_implicitly("close()")
        finally:
            self._drop_layers()
            self.checkpointer, self._closed = None, True

    def _tell_closed(self, save: bool | None) -> None:
        """No error, but once: a loop may go on by intent, and ask for the saves that it always asks for."""
        if save and self._closed and not self._told_closed:
            self._told_closed = True
            _log.warning(
                "iteration %d is not saved: the Checkpointer is closed, and saves no later one either",
                self.count + 1,
            )

    # -- going back ------------------------------------------------------------------------------

    def restore(self, parts: Mapping[str, Any], **how: Any) -> RestoredStep | None:
        """See DistributedOptimizer: `restore` of the wrapped optimizer."""
        if self.checkpointer is None:
            why = "'s Checkpointer is closed" if self._closed else " was given checkpointer=None"
            raise ConfigError(f"restore: this optimizer{why}")
        tree = self._tree.of(parts)
        # In any case: a save that is open stands in the way. Its iteration may still be saved, at its end.
        self._drop_layers()
        try:
            found = self.checkpointer.restore(tree, **how)
        except NotCommitted:  # and nothing has changed
            raise
        except BaseException:
            # What it has left may be no state of any step: it is not to be saved.
            self._give_up()
            raise
        if found is not None:
            self._give_up()
            self.count = found.step
            self._used_at = next(_CLOCK)  # it goes on from what another one may have saved
            self._decisions.went_back(found.step)
        return found

    def _give_up(self) -> None:
        """Let go of the iteration that is under way."""
        self._stepped, self._ended_by, self._refused = False, None, None
        self._layered = self._decisions.deferred = False
        # Before the first step it is where the loop begins, and an iteration without a step counts there.
        self._went_back = self._inside or self._stepped_at > 0
