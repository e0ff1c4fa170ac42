"""The state of training as one tree: Lightning's own checkpoint dict, and beside it what that leaves out.

Lightning's dict consists of references to live tensors, which is what makes it cheap (0.2 ms). What an
optimizer owns (parameters of its groups, its state) stays a reference: it changes only in an optimizer step,
and the barrier comes before that. Everything else may change earlier, in a forward pass, in validation or
in somebody's hook, and is copied at once: buffers, averaged and frozen weights, metrics, counters.

A Python value needs no copy when the tree is saved at once: `Checkpointer.save` freezes it. A tree that
waits for a later hook is frozen here (`frozen`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from ckpt_core import FlatPart, RngState
from ckpt_lightning.loops import batch_ends_epoch, validation_follows
from ckpt_lightning.sharded import copied_already, referring
from ckpt_lightning.stopping import asked_to_stop

EXTRAS = "ckpt_lightning"
"""Key of our own part of the tree."""

_FORMAT = 1

_PLAIN = frozenset({int, float, str, bool, type(None)})
"""Values that nobody changes."""


@dataclass(frozen=True)
class Moment:
    """Where training stands when it is captured.

    Attributes:
        boundary: between two epochs; else after a batch.
        stepped: what Lightning's counter of logged steps must be when the next batch starts.
        owed: plateau schedulers of the batch are still to be stepped: "batch", or "validation" if Lightning
            does that by itself on resume, provided that it would validate here; "" if they are not.
        stopped: training has ended within an epoch, which Lightning has counted as over.
        unfinished: what follows the last batch of an epoch, or a validation, is still to come. A run that
            resumes leaves it out.
    """

    boundary: bool
    stepped: int
    owed: str = ""
    stopped: bool = False
    unfinished: bool = False


def after_batch(trainer: Trainer, *, owed: str) -> Moment:
    """Right after a batch, or after the validation that follows it."""
    loop = trainer.fit_loop.epoch_loop
    # Lightning counts a batch at the very end of everything that belongs to it.
    return Moment(False, loop._batches_that_stepped + (not loop._should_accumulate()), owed)


def before_next_batch(trainer: Trainer) -> Moment:
    """After everything that belongs to a batch (SIGTERM)."""
    return Moment(False, trainer.fit_loop.epoch_loop._batches_that_stepped)


def within_stopped_epoch(trainer: Trainer) -> Moment:
    """Training has stopped, and the epoch is not over (on_train_epoch_end)."""
    return replace(before_next_batch(trainer), stopped=True)


def between_epochs(trainer: Trainer) -> Moment:
    """After everything that belongs to an epoch."""
    return Moment(True, trainer.fit_loop.epoch_loop._batches_that_stepped)


def in_any_hook(trainer: Trainer) -> Moment:
    """Wherever training stands (trainer.save_checkpoint)."""
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = loop.batch_progress.current
    if epochs.started < epochs.ready:  # on_train_epoch_start
        return between_epochs(trainer)
    if batches.processed < batches.ready:
        return before_next_batch(trainer)
    begun = epochs.processed < epochs.ready  # Lightning has not counted the epoch as over
    if batch_ends_epoch(trainer, loop.batch_idx):
        stepped = (after_batch(trainer, owed="") if begun else between_epochs(trainer)).stepped
        return Moment(True, stepped, unfinished=epochs.completed < epochs.ready)
    if not begun:
        return within_stopped_epoch(trainer)
    if batches.completed < batches.processed:  # on_train_batch_end
        follows = validation_follows(trainer)
        return replace(after_batch(trainer, owed="" if follows else "batch"), unfinished=follows)
    return (
        after_batch(trainer, owed="validation")
        if trainer.validating
        else before_next_batch(trainer)
    )


def dump(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint as of now: live tensors, live Python values. Called on the training thread."""
    # This is what `trainer.save_checkpoint` writes. It has no public name, and has had this one since 2.0.
    with referring(trainer):
        tree: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return plain_hparams(tree)


def completed(
    tree: dict[str, Any], trainer: Trainer, moment: Moment, extras: dict[str, Any]
) -> dict[str, Any]:
    """What Lightning has dumped at this moment, as a tree to go on from. Called on the training thread."""
    fit_loop = tree["loops"]["fit_loop"]
    if moment.boundary:
        if moment.unfinished:
            _end_epoch(fit_loop)
        _begin_epoch_anew(fit_loop)
    if moment.stopped:
        _go_on_with_epoch(fit_loop)
    _count_all_batches(fit_loop["epoch_loop.batch_progress"])
    return {**tree, **_extras_beside(trainer, moment, extras)}


def _extras_beside(trainer: Trainer, moment: Moment, extras: dict[str, Any]) -> dict[str, Any]:
    """What Lightning leaves out, under our key."""
    own = {
        "format": _FORMAT,
        "world_size": trainer.world_size,
        "boundary": moment.boundary,
        "stepped": moment.stepped,
        "owed": moment.owed,
        "stopping": asked_to_stop(trainer),
        **passing(trainer, moment),
        "gradients": _gradients(trainer),
    }
    return {EXTRAS: {**own, **extras}}


def passing(trainer: Trainer, moment: Moment) -> dict[str, Any]:
    """The part of it that a validation or a test behind the fit would change."""
    return {"rng": RngState().state_dict(), "metrics": _last_metrics(trainer, moment)}


def merged(early: dict[str, Any], late: dict[str, Any]) -> dict[str, Any]:
    """`late`, with what must be as of `early`: where the loops, the data and the generators stood.

    For modules with an `on_train_batch_end` or `on_validation_end` of their own, which runs after every
    callback's: `early` was dumped before it, `late` when the next batch had been fetched already.
    """
    return {**late, **early}


def early_part(tree: dict[str, Any], owned: Owned) -> dict[str, Any]:
    """What `merged` takes from an early dump, frozen."""
    kept = ("epoch", "global_step", "loops", "callbacks", EXTRAS)
    return frozen({name: tree[name] for name in kept if name in tree}, owned)


class Owned:
    """Knows the memory that optimizers own, which changes in optimizer steps alone.

    For one save: it looks when it is first asked, and then remembers.

    Attributes:
        copies: entries of the tree that nobody changes, since they were copied for it.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], *, copies: Collection[str] = ()
    ) -> None:
        self._optimizers = tuple(optimizers)
        self.copies = frozenset(copies)

    @classmethod
    def of(cls, trainer: Trainer) -> Owned:
        """Of a trainer."""
        return cls(trainer.optimizers, copies=copied_already(trainer))

    def __contains__(self, tensor: Tensor) -> bool:
        place = _place(tensor)
        # The states are asked last: few tensors but parameters come here, and there are several to each.
        return place != 0 and (place in self._parameters or place in self._states)

    @cached_property
    def _parameters(self) -> set[int]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return {_place(param) for group in groups for param in group["params"]}

    @cached_property
    def _states(self) -> set[int]:
        kept = [values for optimizer in self._optimizers for values in optimizer.state.values()]
        found = [item for values in kept if isinstance(values, dict) for item in values.values()]
        return {_place(item) for item in found if isinstance(item, Tensor)}


def protected(tree: dict[str, Any], owned: Owned, *, above_bytes: int) -> dict[str, Any]:
    """The tree with copies of large tensors that no optimizer owns; for a save that starts at once.

    Args:
        above_bytes: tensors up to this size are copied by the save itself.
    """
    copies = _Copies(owned, above_bytes)
    # Optimizer states are left out of the walk: nearly all of them is owned, and they are deep.
    left_out = {"optimizer_states", *owned.copies}
    return {
        name: value if name in left_out else _guarded(value, copies) for name, value in tree.items()
    }


def frozen(tree: dict[str, Any], owned: Owned) -> dict[str, Any]:
    """A copy of the tree, but for the tensors that an optimizer owns; for a save that may start later."""
    return {
        name: value if name in owned.copies else _rebuilt(value, _Copies(owned, -1), copy.deepcopy)
        for name, value in tree.items()
    }


def keep(value: Any) -> Any:
    """The value itself."""
    return value


class _Copies:
    """Copies tensors; the same memory seen twice is one copy."""

    def __init__(self, owned: Owned, above_bytes: int) -> None:
        self._owned = owned
        self._above_bytes = above_bytes
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def spares(self, tensor: Tensor) -> bool:
        """Whether it is not copied."""
        return tensor.nbytes <= self._above_bytes or tensor in self._owned

    def of(self, tensor: Tensor) -> Tensor:
        if self.spares(tensor):
            return tensor.detach()
        local = _local(tensor)
        if not local.numel():
            return tensor.detach().clone()  # it has no place by which to know it
        key = (_place(local), local.data_ptr(), local.shape, local.stride(), local.dtype)
        if key not in self._made:
            self._made[key] = tensor.detach().clone()
        return self._made[key]


def _guarded(value: Any, copies: _Copies) -> Any:
    """The value itself where nothing in it must be copied; else as `_rebuilt` with `keep`."""
    kind = type(value)
    if kind is Tensor and not value.requires_grad and value.layout is torch.strided:
        return value if copies.spares(value) else copies.of(value)
    if kind in (dict, OrderedDict):
        items: Any = value.values()
    elif kind in (list, tuple):
        items = value
    else:
        return value if kind in _PLAIN else _rebuilt(value, copies, keep)
    # At once, not item by item: the state of a generator is hundreds of numbers.
    if _PLAIN.issuperset(map(type, items)):
        return value
    made = [item if type(item) in _PLAIN else _guarded(item, copies) for item in items]
    if all(map(is_, made, items)):
        return value
    if kind in (list, tuple):
        return kind(made)
    anew = kind(zip(value, made, strict=True))
    if kind is OrderedDict:
        anew.__dict__.update(value.__dict__)  # `_metadata` of a module's state
    return anew


def _rebuilt(value: Any, copies: _Copies, other: Callable[[Any], Any]) -> Any:
    """Containers made anew, tensors through `copies`, everything else through `other`."""
    kind = type(value)
    if isinstance(value, Tensor):
        return copies.of(value) if value.layout is torch.strided else value.detach().clone()
    if kind is FlatPart:
        return replace(value, tensor=copies.of(value.tensor))
    if kind is dict:
        if _PLAIN.issuperset(map(type, value.values())):
            return dict(value)
        return {key: _rebuilt(item, copies, other) for key, item in value.items()}
    if kind is OrderedDict:
        made = OrderedDict((key, _rebuilt(item, copies, other)) for key, item in value.items())
        made.__dict__.update(value.__dict__)  # `_metadata` of a module's state
        return made
    if kind in (list, tuple):
        # At once, not item by item: the state of a generator is hundreds of numbers.
        if _PLAIN.issuperset(map(type, value)):
            return kind(value)
        return kind([_rebuilt(item, copies, other) for item in value])
    return value if kind in _PLAIN else other(value)


def _place(tensor: Tensor) -> int:
    local = _local(tensor)
    return int(local.untyped_storage().data_ptr()) if local.layout is torch.strided else 0


def _local(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank; a DTensor has none itself."""
    # Not to_local(), which takes its time, and thousands of them are asked at each save.
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _last_metrics(trainer: Trainer, moment: Moment) -> dict[str, Tensor]:
    """Metrics that were computed already: a plateau scheduler may need one before it is logged again."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    in_batch_end = not moment.boundary and batches.processed != batches.completed
    if in_batch_end and any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        # Lightning has not taken yet what this batch logged, and a scheduler may step by it next.
        return dict(trainer.callback_metrics)
    # Not `trainer.callback_metrics`: that would compute the running ones, a device sync among them.
    metrics: dict[str, Tensor] = getattr(trainer._logger_connector, "_callback_metrics", {})
    return dict(metrics)


def _gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Gradients, where they have been accumulated for a step that is still to come."""
    by_hand = not trainer.lightning_module.automatic_optimization
    # A module that steps by itself may still want any that are there; those that it clears first do no harm.
    if not by_hand and not trainer.fit_loop.epoch_loop._should_accumulate():
        return {}
    named = trainer.lightning_module.named_parameters()
    # Clones: the next backward pass adds to them, long before a barrier.
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def _begin_epoch_anew(fit_loop: dict[str, Any]) -> None:
    """Set the counters within the epoch to zero, as they are when an epoch begins.

    At this moment Lightning still has those of the epoch that is over, and a resumed run would take the
    new epoch for finished.
    """
    for name, progress in fit_loop.items():
        if name.startswith("epoch_loop.") and isinstance(progress, dict):
            _zero_current(progress)
    val = fit_loop.get("epoch_loop.val_loop.batch_progress")
    if val is not None:
        val["total"] = dict.fromkeys(val["total"], 0)


def _end_epoch(fit_loop: dict[str, Any]) -> None:
    """Count the epoch, whose hooks Lightning is still calling."""
    for name in ("current", "total"):
        counts = fit_loop["epoch_progress"][name]
        counts["processed"] = counts["completed"] = counts["started"]


def _count_all_batches(progress: dict[str, Any]) -> None:
    """Count what was never begun: batches that were None, and those at which the module left an epoch.

    Lightning counts them as ready and processed alone, and knows by the totals where a run resumes.
    """
    current, before = progress["current"], progress["total"]["ready"] - progress["current"]["ready"]
    current["started"] = max(current["started"], current["processed"])
    progress["total"] = {name: before + count for name, count in current.items()}


def _go_on_with_epoch(fit_loop: dict[str, Any]) -> None:
    """Take back that an epoch was counted, so that a longer run trains what is left of it."""
    for name in ("current", "total"):
        counts = fit_loop["epoch_progress"][name]
        counts["processed"] = counts["completed"] = counts["started"] - 1


def _zero_current(progress: dict[str, Any]) -> None:
    for name, value in progress.items():
        if name == "current":
            progress[name] = dict.fromkeys(value, 0)
        elif name == "is_last_batch":
            progress[name] = False
        elif isinstance(value, dict):
            _zero_current(value)


def plain_hparams(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with hyper-parameters as plain dicts, which load without `trusted=True`."""
    for name in ("hyper_parameters", "datamodule_hyper_parameters"):
        if isinstance(tree.get(name), dict):
            tree[name] = _plain(tree[name])
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and type(value).__module__.startswith("lightning"):
        value = dict(value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
