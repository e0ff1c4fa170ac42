"""One `step()`: whole, as Horovod makes it, or layer by layer in the order in which all-reduces finish.

    for each layer whose all-reduce is done and whose last snapshot has been copied:
        update it by the user's own optimizer; enqueue its snapshot          while other layers still reduce

Both give the same bits. Layer by layer is for steps that are saved, and for those that start while a snapshot
is still being copied, so that each layer waits for its own copy and for no other (LightCheck III-B).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from ckpt_core import Checkpointer, LayerwiseSave
from ckpt_horovod.layers import LayerSave
from ckpt_horovod.reductions import POLL_S, Reductions
from ckpt_horovod.substeps import SubSteps, unhooked
from ckpt_horovod.tree import StateTree

CHUNK_BYTES = 8 * 2**20
"""Parameters of one partial update: enough for the foreach and fused forms to be worth their launch."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class Stepper:
    """Makes the steps of one optimizer; used on the training thread.

    Args:
        optimizer: the wrapped optimizer.
        stock: its class as Horovod made it.
        tree: names the tensors that a barrier is for.
        separable: whether the user's optimizer may be stepped in parts.
    """

    def __init__(
        self, optimizer: Any, stock: type[Any], tree: StateTree, *, separable: bool
    ) -> None:
        self._optimizer = optimizer
        self._stock = stock
        self._base = stock.__bases__[0]
        self._tree = tree
        self._separable = separable
        self._known = list(map(id, tree.layers()))
        # Adasum updates inside backward; what is called `synchronize` there does nothing.
        self._reduces = hasattr(optimizer, "process_set")
        self.reductions = Reductions(optimizer, stock)

    def sees_to_barrier(self, checkpointer: Checkpointer) -> None:
        """Steps wait here, for each layer alone, and not before all of them."""
        checkpointer.leave_barrier_to_owner(self._optimizer)

    def splits(self, closure: Callable[[], Any] | None) -> bool:
        """Whether this step may be made layer by layer, hooks aside; the same on every rank."""
        optimizer = self._optimizer
        return (
            self._separable
            and closure is None
            and self._reduces
            and not (optimizer._should_synchronize and optimizer._synchronized)
            # A GradScaler hands these to optimizers that unscale by themselves.
            and getattr(optimizer, "grad_scale", None) is None
            and getattr(optimizer, "found_inf", None) is None
        )

    def is_hooked(self) -> bool:
        """Whether somebody's hooks see steps, so that each is to be whole; on this rank alone, perhaps."""
        return any(getattr(self._optimizer, name, None) for name in _HOOKS) or any(
            _is_foreign(hook)
            for name in _GLOBAL_HOOKS
            for hook in getattr(torch_optimizer, name, {}).values()
        )

    @property
    def accumulates(self) -> bool:
        """Whether a step takes several backward passes, which may lie in as many iterations."""
        return _accumulates(self._optimizer)

    def have_gradients(self, optimizers: Iterable[Any], *, reduced: bool = False) -> bool:
        """Whether some rank holds gradients of some of the passes of a step; called on all ranks.

        Args:
            optimizers: those that Horovod wraps, of which it is asked; the same on all ranks.
            reduced: or those that `synchronize()` has reduced for a step; one that is left out (GradScaler)
                looks as one that is yet to be made, until its gradients are gone.
        """
        asked = list(filter(_accumulates, optimizers))
        ranks = getattr(self._optimizer, "process_set", hvd.global_process_set)
        if not asked or not ranks.included():
            return False
        # A pass may leave a rank without any, and what follows from them is done by all ranks or by none.
        mine = any(_has_passes(one) or (reduced and _has_reduced(one)) for one in asked)
        held = torch.tensor(int(mine), device="cpu")
        name = "ckpt_horovod.gradients"
        return bool(hvd.allreduce(held, op=hvd.Sum, name=name, process_set=ranks))

    def reduces_in_step(self) -> bool:
        """Whether all-reduces end within this step, so that layers become final one after the other."""
        optimizer = self._optimizer
        return (
            self._reduces
            and optimizer._should_synchronize
            and not optimizer._synchronized
            and bool(optimizer._requires_update)
        )

    def wait_reduced(self) -> None:
        """Return when the all-reduces of this step are finished, without spinning."""
        if self._reduces and self._optimizer.process_set.included():
            self.reductions.wait()

    def whole(self, checkpointer: Checkpointer | None, closure: Callable[[], Any] | None) -> Any:
        """The stock step, once no snapshot reads what it changes."""
        if self._optimizer._should_synchronize:
            self.wait_reduced()
        if checkpointer is not None:
            checkpointer.wait_staged()
        return unhooked(self._stock.step)(self._optimizer, closure)

    def in_layers(self, checkpointer: Checkpointer, save: LayerSave | None) -> None:
        """The same step, layer by layer; each layer goes to `save` once it is updated.

        Raises:
            HorovodInternalError: an all-reduce failed; some layers may be updated.
            StagingError: a snapshot was not copied within `timeout`.
            ConfigError: the optimizer turned out not to be separable.
        """
        optimizer = self._optimizer
        # By identity, and not by step: a save by hand may have any number.
        own = None if save is None else save.open
        trained = self._trained(checkpointer, own)
        barrier = _Barrier(checkpointer, own, self._tree)
        parts = SubSteps(optimizer, self._base)
        reduces = self.reduces_in_step()
        if reduces:
            self.reductions.issue_missing()
        ready = self._ready_at_once(trained, reduces)
        while ready or (reduces and self.reductions.under_way()):
            if reduces:
                for key in self.reductions.finished():
                    # Horovod goes on to reduce what was taken out of its group.
                    done = self.reductions.complete(key)
                    ready += [param for param in done if id(param) in trained]
            chunk = barrier.take(ready)
            if chunk:
                parts.update(chunk)
                if save is not None:
                    save.stage(chunk)
            elif reduces and self.reductions.under_way():
                time.sleep(POLL_S)
            elif ready:
                barrier.wait(ready[0])
        parts.finish()
        optimizer._synchronized = False
        # The user may change now what the optimizer does not: frozen parameters, averages of weights.
        checkpointer.wait_staged(before=own)

    def _trained(self, checkpointer: Checkpointer, own: LayerwiseSave | None) -> dict[int, Tensor]:
        """What is in the optimizer's groups now, by identity.

        Where that has changed, saves that are under way have other names for it: all of them are waited for.
        """
        found = {id(param): param for param in self._tree.layers()}
        if list(found) != self._known:
            checkpointer.wait_staged(before=own)
            self._known = list(found)
        return found

    def _ready_at_once(self, trained: dict[int, Tensor], reduces: bool) -> list[Tensor]:
        """Parameters with a gradient that this step does not reduce, such as those of a group added since."""
        reduced = self._optimizer._requires_update if reduces else ()
        return [p for p in trained.values() if p.grad is not None and p not in reduced]


def _accumulates(optimizer: Any) -> bool:
    passes: int = optimizer.backward_passes_per_step
    return passes > 1


def _has_passes(optimizer: Any) -> bool:
    passes, left = optimizer.backward_passes_per_step, optimizer._allreduce_delay
    return any(count != passes for count in left.values())


def _has_reduced(optimizer: Any) -> bool:
    # Horovod goes on to say so after a step that was left out.
    return bool(optimizer._synchronized) and any(
        param.grad is not None for param in optimizer._requires_update
    )


def _is_foreign(hook: Any) -> bool:
    """Whether a hook is somebody's who wants to see steps; the engine's own only waits."""
    return not str(getattr(hook, "__module__", "")).startswith("ckpt_core.")


class _Barrier:
    """Which layers may be updated: those that no snapshot but the step's own still reads."""

    def __init__(
        self, checkpointer: Checkpointer, own: LayerwiseSave | None, tree: StateTree
    ) -> None:
        self._checkpointer = checkpointer
        self._own = own
        self._tree = tree
        self._names: dict[int, tuple[str, ...]] = {}
        self._all_clear = False

    def take(self, ready: list[Tensor]) -> list[Tensor]:
        """Remove from `ready`, and return, layers that may be updated now: a chunk of them, or none."""
        if not self._all_clear:
            self._all_clear = self._checkpointer.is_staged(before=self._own)
        taken: list[Tensor] = []
        left: list[Tensor] = []
        size = 0
        for param in ready:
            if size < CHUNK_BYTES and self._is_clear(param):
                taken.append(param)
                size += param.nbytes
            else:
                left.append(param)
        ready[:] = left
        return taken

    def wait(self, param: Tensor) -> None:
        """Block until this layer may be updated."""
        self._checkpointer.wait_staged(self._names_of(param), before=self._own)

    def _is_clear(self, param: Tensor) -> bool:
        return self._all_clear or self._checkpointer.is_staged(
            self._names_of(param), before=self._own
        )

    def _names_of(self, param: Tensor) -> tuple[str, ...]:
        names = self._names.get(id(param))
        if names is None:
            names = self._names[id(param)] = self._tree.names(param)
        return names
