"""Jobs: a run without checkpoints tells what each step is, and one with them saves under delays."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

import ckpt_horovod
from ckpt_core import Checkpointer
from ckpt_core.save.barriers import Barriers
from ckpt_core.share.audit import Audit
from ckpt_core.snapshot.sampling import Sampler
from tests.integrations.horovod.disks import SlowFiles, counting, tiny
from tests.integrations.horovod.training import Recipe, Saving, Training, cloned

ITERATIONS = 6


def consistent(
    root: str,
    recipe: dict[str, Any],
    mode: str,
    every: int = 1,
    **how: Any,
) -> dict[str, Any]:
    """Save under random delays; `reference.N.pt` beside the steps has the state after each iteration.

    Args:
        how: for `Way`.
    """
    way = Way(**how)
    Path(root).mkdir(parents=True, exist_ok=True)
    truth = _reference(Recipe(**{**recipe, "sleep_s": 0.0}, name="reference"), way)
    torch.save(truth, f"{root}/reference.{hvd.rank()}.pt")
    with _without_barrier() if way.barrier is False else contextlib.nullcontext():
        return _saved(Recipe(**recipe, name="saved"), Saving(f"{root}/ckpts", mode, every), way)


class Way:
    """What a loop does besides training.

    Args:
        edit: what it changes after `step`, a method here.
        end: how an iteration ends, a method here.
        barrier: False takes it out.
        attach: whether the model is attached.
        most_s: the longest that a chunk takes on the disk.
        options: of the Checkpointer, besides those of `tiny`.
    """

    def __init__(
        self,
        edit: str = "nothing",
        end: str = "call",
        *,
        barrier: bool = True,
        attach: bool = True,
        most_s: float = 0.004,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.barrier, self.attach = barrier, attach
        self.most_s, self.options = most_s, options or {}
        self._edit, self._end = edit, end
        self.ema: torch.optim.swa_utils.AveragedModel | None = None
        self.second: torch.optim.Optimizer | None = None

    def prepare(self, training: Training, *, saves: bool) -> None:
        """Called once."""
        if self._edit == "ema":
            self.ema = torch.optim.swa_utils.AveragedModel(training.model)
        if self._edit == "second":
            params = training.model.last.parameters()
            self.second = torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
        if not saves:
            return
        training.attach(model=self.attach)
        if self.ema is not None:
            training.optimizer.attach(ema=self.ema)
        if self.second is not None:
            training.optimizer.attach(second=[self.second])

    def iterate(self, training: Training, number: int, *, saves: bool) -> None:
        """One iteration; in a run that saves, ended as it says."""
        getattr(self, f"_end_by_{self._end}")(training, number, saves)

    def state(self, training: Training) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        found = training.state()
        if self.ema is not None:
            found["ema"] = cloned(dict(self.ema.state_dict()))
        if self.second is not None:
            found["second"] = cloned([self.second.state_dict()])
        if not self.attach:
            del found["model"]
        return found

    def _make(self, training: Training, number: int) -> None:
        training.iterate(number)
        with torch.no_grad():
            getattr(self, f"_{self._edit}")(training, number)

    # -- ends ------------------------------------------------------------------------------------

    def _end_by_call(self, training: Training, number: int, saves: bool) -> None:
        self._make(training, number)
        if saves:
            training.optimizer.end_iteration()

    def _end_by_block(self, training: Training, number: int, saves: bool) -> None:
        with training.optimizer.iteration() if saves else contextlib.nullcontext():
            self._make(training, number)

    def _end_by_itself(self, training: Training, number: int, saves: bool) -> None:
        self._make(training, number)

    # -- edits -----------------------------------------------------------------------------------

    def _nothing(self, training: Training, number: int) -> None:
        pass

    def _clamp(self, training: Training, number: int) -> None:
        for param in training.model.parameters():
            param.clamp_(-0.08, 0.08)

    def _frozen(self, training: Training, number: int) -> None:
        training.model.frozen.weight.mul_(0.9)

    def _ema(self, training: Training, number: int) -> None:
        assert self.ema is not None
        self.ema.update_parameters(training.model)

    def _second(self, training: Training, number: int) -> None:
        """Raises no version counter, since it is fused."""
        assert self.second is not None
        self.second.step()

    def _state(self, training: Training, number: int) -> None:
        for state in training.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    value.mul_(0.99)


def _reference(recipe: Recipe, way: Way) -> list[dict[str, Any]]:
    training = Training(recipe)
    way.prepare(training, saves=False)
    states = []
    for number in range(ITERATIONS):
        way.iterate(training, number, saves=False)
        states.append(way.state(training))
    return states


def _saved(recipe: Recipe, saving: Saving, way: Way) -> dict[str, Any]:
    files = SlowFiles(recipe.seed * 10 + hvd.rank(), way.most_s)
    with (
        warnings_logged() as warned,
        counting() as counted,
        Checkpointer(
            saving.root,
            tiny(**way.options),
            coordination=ckpt_horovod.coordination(),
            files=files,
        ) as ck,
    ):
        training = Training(recipe, saving.options(ck))
        way.prepare(training, saves=True)
        for number in range(ITERATIONS):
            way.iterate(training, number, saves=True)
        ended = training.optimizer.iterations
    return {
        "ended_before_close": ended,
        "ended": training.optimizer.iterations,
        "in_layers": counted.in_layers,
        "warnings": warned,
        "checkpointer": repr(training.optimizer.checkpointer),
    }


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What is logged as a warning, or worse, by the integration."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("ckpt_horovod"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _without_barrier() -> Iterator[None]:
    """The negative control: training goes on whatever is being copied, and nothing is compared."""
    kept = Checkpointer.wait_staged, Checkpointer.is_staged
    own, sample, marks = Barriers.before_step, Sampler.take, Audit.marks
    Checkpointer.wait_staged = lambda *_, **__: None  # type: ignore[method-assign]
    Checkpointer.is_staged = lambda *_, **__: True  # type: ignore[method-assign]
    Barriers.before_step = lambda self, optimizer: None  # type: ignore[method-assign]
    Sampler.take = lambda self, items: []  # type: ignore[method-assign]
    Audit.marks = lambda self: {}  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpointer.wait_staged, Checkpointer.is_staged = kept  # type: ignore[method-assign]
        Barriers.before_step, Sampler.take = own, sample  # type: ignore[method-assign]
        Audit.marks = marks  # type: ignore[method-assign]
