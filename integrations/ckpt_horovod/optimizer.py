"""`DistributedOptimizer`: Horovod's, with checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from ckpt_core import Checkpointer, ConfigError, RestoredStep, SaveHandle
from ckpt_horovod.coordinating import refuse_outside
from ckpt_horovod.deciding import Decisions, Policy, policy_of
from ckpt_horovod.iterations import Iterations
from ckpt_horovod.layers import Layerwise
from ckpt_horovod.reductions import let_end, under_way
from ckpt_horovod.separable import is_separable
from ckpt_horovod.stepping import Stepper
from ckpt_horovod.tree import StateTree

_USED = ("_handles", "_requires_update", "_synchronized", "_allreduce_delay", "_parameter_names")


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *horovod_arguments: Any,
    checkpointer: Checkpointer | None,
    every_n_steps: int | None = None,
    policy: Policy | None = None,
    layerwise: Layerwise | str = Layerwise.LAZY,
    separable: bool | None = None,
    per_rank: Iterable[str] = (),
    **horovod_options: Any,
) -> Any:
    """Wrap `optimizer` by `hvd.DistributedOptimizer`, and save its training.

    Called on every rank, where `hvd.DistributedOptimizer` would be. The result is one: the same class by
    `isinstance`, the same methods, the same bits. State that `optimizer` has already is kept (Horovod
    itself drops it). On top of Horovod's methods it has those of `Checkpoints`.

    Args:
        optimizer: any torch optimizer.
        named_parameters: names and parameters; without it, parameters have numbers for names.
        horovod_arguments, horovod_options: everything else that hvd.DistributedOptimizer takes.
        checkpointer: made with `coordination=ckpt_horovod.coordination()`. None: nothing is saved.
        every_n_steps: save the iterations whose number is a multiple of this.
        policy: or, save when it says so: an object with `should_save(step)`.
            With neither, `end_iteration(save=True)` saves.
        layerwise: when layers are enqueued, see Layerwise.
        separable: whether `optimizer` may be stepped in parts; None finds out.
        per_rank: paths of the saved tree, such as "sampler", that belong to each rank alone.

    Raises:
        ConfigError: an argument is wrong; the checkpointer is not shared by the ranks.

    Source: LightCheck (ICCD '23) section III, on supported hooks.
    """
    when = _layerwise(layerwise)
    asked = policy_of(every_n_steps, policy)
    splits = is_separable(optimizer) if separable is None else bool(separable)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters, *horovod_arguments, **horovod_options
    )
    _check(wrapped, checkpointer)
    # Order matters: Horovod's constructor makes an empty state.
    wrapped.state.update(optimizer.state)
    made = _iterations(wrapped, asked, separable=splits, layerwise=when, per_rank=tuple(per_rank))
    made.use(checkpointer)
    return wrapped


class Checkpoints:
    """What the wrapped optimizer has on top of Horovod's; its methods are copied into the class.

    Used on the training thread, on every rank alike.
    """

    _stock: type[Any]
    _iterations: Iterations
    _tree: StateTree
    param_groups: list[dict[str, Any]]

    # -- Horovod's ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As Horovod's, and enqueues the snapshot of each layer where this iteration is saved."""
        return self._iterations.step(closure)

    def synchronize(self) -> None:
        """As Horovod's, without burning a core while it waits."""
        self._iterations._stepper.wait_reduced()
        self._stock.synchronize(self)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As Horovod's; ends the iteration if `step` has been made and nobody ended it."""
        try:
            self._iterations.end_implicitly("zero_grad()")
        finally:
            # Also where an earlier save is reported: training may go on, and not with old gradients.
            self._stock.zero_grad(self, *args, **kwargs)

    # -- ours -----------------------------------------------------------------------------------

    @property
    def iterations(self) -> int:
        """How many iterations have ended, those of earlier runs among them: the number of the next one."""
        return self._iterations.count

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What saves; None once it is closed."""
        return self._iterations.checkpointer

    def attach(self, **parts: Any) -> None:
        """Say what else belongs to a checkpoint: model=, scheduler=, scaler=, sampler=, other optimizers.

        Attach the model, so that buffers are saved (those of the first rank, as DistributedDataParallel
        takes them). Random numbers are attached from the start, as rng=RngState().

        Raises:
            ConfigError: a name is taken.
        """
        self._tree.attach(parts)
        for part in parts.values():
            if isinstance(part, nn.Module):
                part.register_forward_pre_hook(_EndsIteration(self._iterations))

    def iteration(self, *, save: bool | None = None, **parts: Any) -> AbstractContextManager[None]:
        """A block that is one iteration: what is saved is what holds at its end.

        Args:
            save, parts: as for `end_iteration`, which the end of the block calls.
        """
        return self._iterations.iteration(parts, save=save)

    def end_iteration(self, *, save: bool | None = None, **parts: Any) -> SaveHandle | None:
        """End the iteration; called after `step`, `scheduler.step`, `scaler.update`, before `zero_grad`.

        Where it is left out, the next `zero_grad`, `step` or forward of an attached module (in training
        mode) ends the iteration.

        Args:
            save: save it or not, whatever the policy says; None: as that says. Once the Checkpointer is
                closed, nothing is saved, and the first True is warned of.
            parts: what belongs to the checkpoint besides what is attached, such as losses=losses.

        Returns:
            The handle of the save that was started; None if none was.

        Raises:
            CkptError: as for `Checkpointer.save`; training may go on.
        """
        return self._iterations.end(parts, save=save)

    def restore(
        self, *, step: int | None = None, strict: bool = False, trusted: bool = False, **parts: Any
    ) -> RestoredStep | None:
        """Fill model, optimizer and all that is attached from the newest step; None if there is none.

        Lists and dicts, and those in them, get back in place the numbers, texts, bytes and None that they
        held, and tuples, sets and deques of those. Anything else that is no tensor or array, and does not
        load, is in `.state` of the result alone: a number or tuple as a part of its own, a `Counter`.

        Called on every rank, before training. All ranks have the same step afterwards, so nothing need be
        broadcast. Where there is none, nothing has changed, and the iteration goes on. Else `iterations` goes
        on from it, gradients are gone, and an `iteration()` block around this call is no iteration, unless it
        makes a step afterwards; nor is an `end_iteration()` behind it, where steps were made before.

        Args:
            step, strict, trusted: as for `Checkpointer.restore`.
            parts: those that were given to `end_iteration`, filled as attached ones are; any placeholder does
                for plain values.

        Raises:
            ConfigError: there is no checkpointer, or it is closed.
            RestoreError: as for `Checkpointer.restore`.
        """
        how = {"step": step, "strict": strict, "trusted": trusted}
        wrapped = self._tree.wrapped(parts)
        handles = under_way(wrapped)  # which `load_state_dict` of Horovod forgets
        found = None
        try:
            with keeping_groups(wrapped):
                found = self._iterations.restore(parts, **how)
        finally:
            if found is not None or len(under_way(wrapped)) < len(handles):
                # Or the next backward would ask for names that are still being reduced: Horovod refuses that.
                let_end(handles)
                for optimizer in wrapped:
                    _forget_reductions(optimizer)
        if found is not None:
            self._tree.fill(parts, found.state)
        return found

    def checkpoint_tree(self, **parts: Any) -> dict[str, Any]:
        """The tree that a save takes now, for `Checkpointer.save` and `restore`."""
        return self._tree.of(parts)


class _EndsIteration:
    """The hook of an attached model: its forward in training mode ends the iteration.

    A copy of the model (an average, a pickle) has a hook that does nothing, and knows neither the optimizer
    nor this package.
    """

    def __init__(self, iterations: Iterations) -> None:
        self._iterations = iterations

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        # A compiled forward must not take the save into its graph; zero_grad or step ends the iteration.
        if not torch.compiler.is_compiling() and module.training:
            self._iterations.end_implicitly("the next forward")

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and returns None


def _iterations(
    wrapped: Any,
    policy: Policy | None,
    *,
    separable: bool,
    layerwise: Layerwise,
    per_rank: tuple[str, ...],
) -> Iterations:
    """Those of `wrapped`, which has the methods of Checkpoints from now on."""
    names, stock = _names_of(wrapped), type(wrapped)
    tree = StateTree(wrapped, names)
    first = next(iter(names.values()), "")
    made = Iterations(
        Stepper(wrapped, stock, tree, separable=separable),
        tree,
        Decisions(policy, process_set=_process_set(wrapped), name=first),
        layerwise=layerwise,
        per_rank=per_rank,
    )
    _become(wrapped, stock, made, tree)
    return made


def _become(wrapped: Any, stock: type[Any], iterations: Iterations, tree: StateTree) -> None:
    """Give `wrapped` a class of its own: Horovod's, with the methods of Checkpoints.

    Flat, and not derived: Horovod's class calls `super(self.__class__, self)`, which would never end in a
    class derived from it. Its module stays Horovod's, by which `broadcast_optimizer_state` knows it.
    """
    names = dict(stock.__dict__)
    names |= {key: item for key, item in vars(Checkpoints).items() if not key.startswith("__")}
    for key in ("__dict__", "__weakref__"):
        names.pop(key, None)
    if not hasattr(wrapped, "process_set"):
        names["_allreduce_grad_async"] = _adasum_update(stock)
    wrapped._stock, wrapped._iterations, wrapped._tree = stock, iterations, tree
    wrapped.__class__ = type(stock.__name__, stock.__bases__, names)
    # torch puts the hooks of `step` around the method of each new class.
    wrapped._patch_step_function()


def _adasum_update(stock: type[Any]) -> Callable[..., Any]:
    """Adasum changes a parameter inside backward, so the barrier is there."""

    def update(self: Any, param: Tensor) -> Any:
        checkpointer = self._iterations.checkpointer
        if checkpointer is not None:
            checkpointer.wait_staged()
        return stock._allreduce_grad_async(self, param)

    return update


def _layerwise(value: Layerwise | str) -> Layerwise:
    try:
        return Layerwise(value)
    except ValueError:
        known = " or ".join(repr(mode.value) for mode in Layerwise)
        raise ConfigError(f"layerwise={value!r} is unknown: use {known}") from None


def _check(wrapped: Any, checkpointer: Checkpointer | None) -> None:
    missing = [name for name in _USED if not hasattr(wrapped, name)]
    if missing:
        raise ConfigError(
            f"this release of Horovod keeps its all-reduces in another way ({missing[0]} is missing): "
            f"install horovod==0.28.1"
        )
    if checkpointer is None:
        return
    if not isinstance(checkpointer, Checkpointer):
        raise ConfigError(
            f"checkpointer={checkpointer!r} must be a ckpt_core.Checkpointer, such as "
            f"Checkpointer('ckpts', coordination=ckpt_horovod.coordination())"
        )
    ranks = _process_set(wrapped)
    refuse_outside(ranks)
    if (checkpointer.rank, checkpointer.world_size) != (ranks.rank(), ranks.size()):
        raise ConfigError(
            f"checkpointer is rank {checkpointer.rank} of {checkpointer.world_size}, and this process is "
            f"rank {ranks.rank()} of {ranks.size()} that train together: make it with "
            f"coordination=ckpt_horovod.coordination()"
        )


def _process_set(wrapped: Any) -> Any:
    return getattr(wrapped, "process_set", hvd.global_process_set)


def _names_of(wrapped: Any) -> dict[Tensor, str]:
    names: dict[Tensor, str] = wrapped._parameter_names
    return names


@contextmanager
def keeping_groups(optimizers: Iterable[Any]) -> Iterator[None]:
    """Whatever is loaded in the block, the groups are the objects that they were before.

    A scheduler that was made before the optimizer was wrapped sets the learning rate of those.
    """
    kept = [(optimizer, list(optimizer.param_groups)) for optimizer in optimizers]
    try:
        yield
    finally:
        # Also where another part refuses what is loaded: training may go on with what it has now.
        for optimizer, groups in kept:
            if len(groups) == len(optimizer.param_groups):
                _put_back(optimizer, groups)


def _put_back(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    for group, restored in zip(groups, optimizer.param_groups, strict=True):
        if group is not restored:
            group.clear()
            group.update(restored)
    optimizer.param_groups[:] = groups


def _forget_reductions(optimizer: Any) -> None:
    """What was under way belongs to a step that has been given up (as `load_state_dict` of Horovod does)."""
    optimizer._handles = {}
    optimizer._synchronized, optimizer._should_synchronize = False, True
    for param in optimizer._allreduce_delay:
        optimizer._allreduce_delay[param] = optimizer.backward_passes_per_step
    # Horovod leaves these as they were: a group would be reduced before its last gradient is there.
    for group in getattr(optimizer, "_group_counts", ()):
        optimizer._group_counts[group] = 0
    # They would be added to those of the next step, which has all its passes before it again.
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
