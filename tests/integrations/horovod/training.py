"""A small real model under Horovod, trained in several ways, stock or with checkpoints."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import ckpt_horovod
from ckpt_core import Checkpointer
from tests.integrations.horovod import own_optimizers

BATCH, FEATURES, CLASSES, WORDS = 8, 16, 4, 60


class Net(nn.Module):
    """BatchNorm, dropout, a layer that gets no gradient, a frozen one; an embedding on demand."""

    def __init__(self, width: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(width, width)
        self.unused = nn.Linear(4, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, CLASSES)
        self.words = nn.Embedding(WORDS, width, sparse=True) if sparse else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x))))
        if self.words is not None:
            h = h + self.words((x[:, :3] * 1000).long().abs() % WORDS).sum(1)
        result: Tensor = self.last(torch.relu(self.second(h) + self.frozen(h)))
        return result


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; JSON can hold its fields.

    Attributes:
        name: of this training; prefix of its all-reduces, so that none is taken for another's.
        optimizer: class of torch.optim or of own_optimizers, and its options.
        horovod: arguments of DistributedOptimizer; some in words, see `_horovod_options`.
        loop: "plain", or one of the ways in `Training.iterate`.
        ranks: those of a process set; None for all.
        trained_alone: the optimizer is not given the frozen layer.
        sleep_s: longest random pause in backward, different on each rank.
    """

    name: str
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    horovod: dict[str, Any] = field(default_factory=dict)
    loop: str = "plain"
    ranks: list[int] | None = None
    sparse: bool = False
    width: int = 128
    trained_alone: bool = False
    sleep_s: float = 0.0
    seed: int = 0


class Training:
    """One training run of a recipe on this rank.

    Args:
        checkpoints: arguments of ckpt_horovod.DistributedOptimizer; None for Horovod's own.
    """

    def __init__(self, recipe: Recipe, checkpoints: dict[str, Any] | None = None) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = Net(recipe.width, sparse=recipe.sparse)
        options = _horovod_options(recipe, self.model)
        self.optimizer = self._wrap(options, checkpoints)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=16.0) if "scaler" in recipe.loop else None
        )
        self._pauses = random.Random(f"{recipe.seed} {hvd.rank()}")
        for param in self.model.parameters():
            if recipe.sleep_s and param.requires_grad:
                param.register_hook(self._pause)
        seed = 1000 * recipe.seed + hvd.rank()
        torch.manual_seed(seed)
        random.seed(seed)

    def _wrap(self, options: dict[str, Any], checkpoints: dict[str, Any] | None) -> Any:
        recipe = self.recipe
        base = make_optimizer(
            recipe.optimizer, self.model, recipe.options, trained_alone=recipe.trained_alone
        )
        named = [(f"{recipe.name}.{name}", p) for name, p in self.model.named_parameters()]
        if checkpoints is None:
            return hvd.DistributedOptimizer(base, named_parameters=named, **options)
        return ckpt_horovod.DistributedOptimizer(
            base, named_parameters=named, **options, **checkpoints
        )

    def attach(self, *, model: bool = True) -> None:
        """Attach all that belongs to a checkpoint; or all but the model."""
        parts = {"scaler": self.scaler} if self.scaler else {}
        if model:
            parts["model"] = self.model
        self.optimizer.attach(scheduler=self.scheduler, **parts)

    # -- an iteration ----------------------------------------------------------------------------

    def backward(self, number: int, part: int = 0) -> Tensor:
        """Forward and backward on the data of this iteration and rank."""
        loss = self.loss(number, part)
        loss.backward()
        return loss

    def loss(self, number: int, part: int = 0) -> Tensor:
        """Of the data of this iteration, which each rank has its own of."""
        seed = (self.recipe.seed * 100 + number) * 100 + part * 10 + hvd.rank()
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH, FEATURES, generator=generator)
        y = torch.randint(CLASSES, (BATCH,), generator=generator)
        loss: Tensor = nn.functional.cross_entropy(self.model(x), y)
        return loss

    def iterate(self, number: int) -> None:
        """One iteration, all but its end."""
        getattr(self, f"_{self.recipe.loop}")(number)
        self.scheduler.step()

    def _plain(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def _passes(self, number: int) -> None:
        self.optimizer.zero_grad()
        for part in range(2):
            self.backward(number, part)
        self.optimizer.step()

    def _clip(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def _scaler(self, number: int, *, factor: float = 1.0) -> None:
        assert self.scaler is not None
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(number) * factor).backward()
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def _scaler_inf(self, number: int) -> None:
        self._scaler(number, factor=float("inf") if number % 3 == 2 else 1.0)

    def _closure(self, number: int) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.backward(number)
            self.optimizer.synchronize()
            return loss

        self.optimizer.step(closure)

    def _forward_first(self, number: int) -> None:
        loss = self.loss(number)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _step_alone(self, number: int) -> None:
        """No forward and no `zero_grad`: gradients out of nowhere."""
        generator = torch.Generator().manual_seed(number * 10 + hvd.rank())
        for param in self.model.parameters():
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=generator)
        self.optimizer.step()

    def _twice(self, number: int) -> None:
        self._plain(number)
        self.optimizer.zero_grad()
        self.backward(number, 1)
        self.optimizer.step()

    def _by_hand(self, number: int) -> None:
        """Gradients of parameters that Horovod does not reduce: a frozen one, and one that came later."""
        if number == 2:
            self.late = nn.Parameter(torch.ones(4))
            self.optimizer.add_param_group({"params": [self.late], "lr": 0.02})
            self.scheduler.base_lrs.append(0.02)
        self.optimizer.zero_grad()
        self.backward(number)
        self.model.frozen.weight.grad = torch.full_like(self.model.frozen.weight, 0.01)
        if number >= 2:
            self.late.grad = torch.ones(4)
        self.optimizer.step()

    def _refrozen(self, number: int) -> None:
        """A layer is frozen in the middle of training: Horovod goes on to reduce it."""
        if number == 2:
            self.model.second.requires_grad_(False)
        self._plain(number)

    def _hooked(self, number: int) -> None:
        if number == 0:
            self.hooks = torch.zeros(2)
            self.optimizer.register_step_pre_hook(lambda *_: self.hooks[0].add_(1) and None)
            self.optimizer.register_step_post_hook(lambda *_: self.hooks[1].add_(1) and None)
        self._plain(number)

    def _pause(self, grad: Tensor) -> None:
        pause(self._pauses, self.recipe.sleep_s)

    # -- looking ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a run goes on from, in memory of its own; tensors and plain values."""
        found = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }
        if self.recipe.loop == "hooked":
            found["hooks"] = self.hooks
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        return cloned(found)

    def digest(self, *, buffers: bool = True) -> str:
        """Of every bit of `state`, the order of its entries included; or of all but the buffers."""
        state = self.state()
        if not buffers:
            state["model"] = dict(self.model.named_parameters())
        return digest(state)


def make_optimizer(
    name: str, model: nn.Module, options: dict[str, Any], *, trained_alone: bool = False
) -> Any:
    """Two groups of different weight decay and learning rate, where the optimizer knows groups."""
    own = getattr(own_optimizers, name, None)
    cls: Any = own or getattr(torch.optim, name)
    params = [
        (key, param)
        for key, param in model.named_parameters()
        if param.requires_grad or not trained_alone
    ]
    if name == "LBFGS":
        return cls([param for _, param in params], **options)
    decayed = [param for _, param in params if param.dim() > 1]
    others = [param for _, param in params if param.dim() == 1]
    rest: dict[str, Any] = {"lr": 0.01}
    if name != "Rprop":
        rest["weight_decay"] = 0.0
        options = {"weight_decay": 0.05, **options}
    return cls([{"params": decayed}, {"params": others, **rest}], **{"lr": 0.03, **options})


def _horovod_options(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    options = dict(recipe.horovod)
    if "op" in options:
        options["op"] = getattr(hvd, options["op"])
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    if options.get("groups") == "lists":
        trained = [param for param in model.parameters() if param.requires_grad]
        options["groups"] = [trained[:3], trained[5:7]]
    if recipe.ranks is not None:
        options["process_set"] = process_set(recipe.ranks)
    return options


_process_sets: dict[tuple[int, ...], Any] = {}


def process_set(ranks: Iterable[int]) -> Any:
    """The process set of these ranks, made once; every rank of the job calls this."""
    key = tuple(ranks)
    if key not in _process_sets:
        everybody = len(key) == hvd.size()
        _process_sets[key] = hvd.global_process_set if everybody else hvd.add_process_set(list(key))
    return _process_sets[key]


def pause(source: random.Random, most_s: float) -> None:
    """Sleep for a random while; mostly short."""
    time.sleep(source.random() ** 2 * most_s)


def cloned(tree: Any) -> Any:
    """A deep copy of nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: cloned(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(cloned, tree))
    return tree


def digest(tree: Any) -> str:
    """A hash of every bit of a tree."""
    found = hashlib.sha256()
    _feed(found, tree)
    return found.hexdigest()[:16]


def _feed(found: Any, tree: Any) -> None:
    if isinstance(tree, Tensor):
        found.update(f"{tree.dtype} {tuple(tree.shape)}".encode())
        found.update(tree.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, dict):
        for key, value in tree.items():
            found.update(repr(key).encode())
            _feed(found, value)
    elif isinstance(tree, list | tuple):
        found.update(str(len(tree)).encode())
        for value in tree:
            _feed(found, value)
    else:
        found.update(repr(tree).encode())


@dataclass(frozen=True)
class Saving:
    """How a run saves.

    Attributes:
        root: of its Checkpointer.
        mode: of the layers.
        every: save every so many iterations.
    """

    root: str
    mode: str
    every: int = 1

    def options(self, checkpointer: Checkpointer | None) -> dict[str, Any]:
        """Arguments for `Training`."""
        return {
            "checkpointer": checkpointer,
            "every_n_steps": self.every,
            "layerwise": self.mode,
        }
