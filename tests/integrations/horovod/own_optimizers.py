"""Optimizers such as users write; defaults for every argument, since Horovod calls the class without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad + group["weight_decay"] * param

    def _momentum(self, param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum"].mul_(0.9).add_(grad)
        return momentum


class PlainOwn(_Own):
    """Each parameter by itself: separable."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group, param, grad in self._with_gradients():
            param.add_(self._momentum(param, grad), alpha=-group["lr"])


class NestedState(_Own):
    """Keeps what it knows of a parameter deeper in its state (as Shampoo and SOAP do): separable."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group, param, grad in self._with_gradients():
            state = self.state[param]
            if not state:
                state["factors"] = [torch.zeros_like(param), {"second": torch.zeros_like(param)}]
            first, second = state["factors"][0], state["factors"][1]["second"]
            second.mul_(0.5).add_(first.mul_(0.9).add_(grad))
            param.add_(second, alpha=-group["lr"])


class ToyLamb(_Own):
    """A trust ratio for each parameter: separable."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group, param, grad in self._with_gradients():
            update = self._momentum(param, grad)
            ratio = param.norm() / update.norm().clamp_min(1e-6) if param.norm() > 0 else 1.0
            param.add_(update * ratio, alpha=-group["lr"])


class GlobalNorm(_Own):
    """Divides by the norm of all gradients together (as FusedLAMB does): not separable."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        norms = [grad.norm() for _, _, grad in self._with_gradients()]
        scale = 1 / torch.stack(norms).norm().clamp_min(1.0) if norms else 1.0
        for group, param, grad in self._with_gradients():
            param.add_(self._momentum(param, grad) * scale, alpha=-group["lr"])


class GroupCounter(_Own):
    """Counts steps in the group (as FusedAdam and Prodigy do): not separable."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        for group, param, grad in self._with_gradients():
            param.add_(self._momentum(param, grad), alpha=-group["lr"] / group["steps"])


class SelfCounter(_Own):
    """Counts steps in itself: not separable."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.calls += 1
        for group, param, grad in self._with_gradients():
            param.add_(self._momentum(param, grad), alpha=-group["lr"] / self.calls)


class RandomDraws(_Own):
    """Draws a number in each step, which decides nothing here: in parts it would draw more of them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if torch.rand(()) < 0:
            return
        for group, param, grad in self._with_gradients():
            param.add_(self._momentum(param, grad), alpha=-group["lr"])


class ClippingSGD(torch.optim.SGD):
    """A torch optimizer whose step was overridden, to clip by the norm of all: not separable."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=0.9)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_([p for p in params if p.grad is not None], 0.5)
        super().step()
