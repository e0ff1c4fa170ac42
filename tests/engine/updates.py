"""Small real programs, each of which changes its state in a way of its own and says nothing to the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

WIDTH = 160


class Program:
    """A model that is trained; `update` changes the state after each forward and backward pass."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.parts: dict[str, Any] = {"model": self.model}
        self.update: Callable[[], Any] = lambda: None

    def state(self) -> dict[str, Any]:
        """The live state."""
        return self.parts

    def loss(self) -> torch.Tensor:
        """Forward."""
        return self.model(torch.ones(4, WIDTH)).square().mean()

    def backward(self) -> None:
        """Forward and backward."""
        self.model.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        """One step of training."""
        self.backward()
        self.update()

    def params(self) -> list[nn.Parameter]:
        """Of the model."""
        return list(self.model.parameters())


def _stepping(program: Program, optimizer: Any, **parts: Any) -> Program:
    program.parts |= {"optimizer": optimizer} | parts
    program.update = optimizer.step
    return program


def sgd() -> Program:
    program = Program()
    return _stepping(program, torch.optim.SGD(program.params(), lr=0.1, momentum=0.9))


def adam_foreach() -> Program:
    program = Program()
    return _stepping(program, torch.optim.Adam(program.params(), foreach=True))


def adamw_fused() -> Program:
    program = Program()
    return _stepping(program, torch.optim.AdamW(program.params(), fused=True))


def lbfgs() -> Program:
    program = Program()
    optimizer = torch.optim.LBFGS(program.params(), max_iter=3, history_size=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = program.loss()
        loss.backward()
        return loss

    program.parts["optimizer"] = optimizer
    program.update = lambda: optimizer.step(closure)
    return program


def scheduled() -> Program:
    """A scheduler puts its own function in the place of `step`."""
    program = Program()
    optimizer = torch.optim.SGD(program.params(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    program.parts |= {"optimizer": optimizer, "scheduler": scheduler}
    program.update = lambda: (optimizer.step(), scheduler.step())
    return program


def scaled() -> Program:
    program = Program()
    optimizer = torch.optim.SGD(program.params(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def update() -> None:
        program.model.zero_grad()
        scaler.scale(program.loss()).backward()
        scaler.step(optimizer)
        scaler.update()

    program.parts |= {"optimizer": optimizer, "scaler": scaler}
    program.update = update
    return program


def not_in_the_state() -> Program:
    """The optimizer is no part of what is saved."""
    program = Program()
    program.update = torch.optim.SGD(program.params(), lr=0.1).step
    return program


def plain_tensors() -> Program:
    """The state is what `state_dict` gives, as torch.save would take it."""
    program = Program()
    optimizer = torch.optim.Adam(program.params())
    program.update = optimizer.step
    program.state = lambda: {  # type: ignore[method-assign]
        "model": dict(program.model.state_dict()),
        "optimizer": optimizer.state_dict(),
    }
    return program


def two_optimizers() -> Program:
    """Parts of a model that are updated in turn, as in a GAN."""
    program = Program()
    half = len(program.params()) // 2
    first = torch.optim.Adam(program.params()[:half])
    second = torch.optim.SGD(program.params()[half:], lr=0.1, momentum=0.9)

    def update() -> None:
        first.step()
        program.backward()
        second.step()

    program.parts |= {"first": first, "second": second}
    program.update = update
    return program


def in_backward() -> Program:
    """One optimizer for each parameter, stepped as soon as its gradient is there."""
    program = Program()
    optimizers = {id(p): torch.optim.Adam([p]) for p in program.params()}
    for param in program.params():
        param.register_post_accumulate_grad_hook(lambda p: optimizers[id(p)].step())
    program.parts["optimizers"] = list(optimizers.values())
    return program


class Own(torch.optim.SGD):
    """A user's optimizer."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(list(group["params"]), 0.999)


def own_class() -> Program:
    program = Program()
    return _stepping(program, Own(program.params(), lr=0.1, momentum=0.9))


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that never called its parent's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def wrapped() -> Program:
    program = Program()
    inner = torch.optim.SGD(program.params(), lr=0.1, momentum=0.9)
    program.parts["optimizer"] = inner
    program.update = Wrapper(inner).step
    return program


def master_weights() -> Program:
    """As apex and DeepSpeed: the optimizer has copies of its own, and the model is written behind it."""
    program = Program()
    masters = [nn.Parameter(p.detach().clone()) for p in program.params()]
    inner = torch.optim.SGD(masters, lr=0.1)

    def update() -> None:
        for master, param in zip(masters, program.params(), strict=True):
            master.grad = param.grad
        inner.step()
        with torch.no_grad():
            for master, param in zip(masters, program.params(), strict=True):
                param.copy_(master)

    program.update = update
    return program


def averaged() -> Program:
    """Averages of weights follow each step."""
    program = Program()
    optimizer = torch.optim.SGD(program.params(), lr=0.1)
    average = AveragedModel(program.model)
    program.parts |= {"optimizer": optimizer, "average": average}
    program.update = lambda: (optimizer.step(), average.update_parameters(program.model))
    return program


def other_thread() -> Program:
    program = Program()
    optimizer = torch.optim.SGD(program.params(), lr=0.1)

    def update() -> None:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    program.parts["optimizer"] = optimizer
    program.update = update
    return program


def compiled() -> Program:
    program = Program()
    optimizer = torch.optim.SGD(program.params(), lr=0.1, momentum=0.9)
    program.parts["optimizer"] = optimizer
    program.update = torch.compile(optimizer.step, backend="eager")
    return program


PROGRAMS: tuple[Callable[[], Program], ...] = (
    *(sgd, adam_foreach, adamw_fused, lbfgs, scheduled, scaled, not_in_the_state, plain_tensors),
    *(two_optimizers, in_backward, own_class, wrapped, master_weights, averaged, other_thread),
)
