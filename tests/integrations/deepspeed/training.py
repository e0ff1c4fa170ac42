"""The model of the tests, engines for it, and what they hold. Nothing here imports ckpt_deepspeed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def config(zero: int, dtype: str, *, ours: bool, **section: Any) -> dict[str, Any]:
    """A DeepSpeed configuration; `section` goes to `checkpoint_engine`."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": zero, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if ours:
        found["checkpoint_engine"] = {"type": "ckpt_core", **section}
    return found


class Model(nn.Module):
    """A frozen layer, shared weights and a buffer that every forward pass changes."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        if tied:
            self.tied.weight = self.first.weight
        self.last = nn.Linear(32, 8)
        self.register_buffer("seen", torch.zeros(6000))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(self.tied(torch.relu(self.first(self.frozen(data)))))


def engine(
    zero: int, dtype: str, *, ours: bool = True, seed: int = 0, tied: bool = True, **section: Any
) -> Any:
    """A fresh engine with its optimizer and a scheduler."""
    return engine_for(config(zero, dtype, ours=ours, **section), seed=seed, tied=tied)


def engine_for(
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    tied: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Any:
    """A fresh engine with a configuration of one's own."""
    torch.manual_seed(seed)
    model = Model(tied=tied)
    made_by = optimizer([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=made_by,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(made_by, 2),
        config=dict(settings),
    )
    return made


def train(made: Any, begin: int, end: int) -> None:
    """Steps `begin` to `end`, each with its own data on each rank."""
    dtype = torch.bfloat16 if made.bfloat16_enabled() else torch.float32
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        data = torch.randn(4, 32, generator=generator).to(dtype)
        made.backward(made(data).float().square().mean())
        made.step()


def weights(made: Any) -> str:
    """SHA-256 of this rank's part of the parameters."""
    found = hashlib.sha256()
    for param in _params(made):
        found.update(param.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def digest(made: Any) -> str:
    """SHA-256 of parameters, buffer, optimizer state of this rank and scheduler."""
    found = hashlib.sha256()
    for tensor in _tensors(made):
        found.update(tensor.detach().float().contiguous().numpy().tobytes())
    found.update(repr(made.lr_scheduler.state_dict()).encode())
    return found.hexdigest()


def _tensors(made: Any) -> list[torch.Tensor]:
    state = made.optimizer.state_dict()
    return [*_params(made), made.module.seen, *_in(state)]


def _params(made: Any) -> list[torch.Tensor]:
    params = list(made.module.parameters())
    if made.zero_optimization_stage() == 3:
        params = [param.ds_tensor for param in params]
    return params


def _in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for key in sorted(tree, key=str) for tensor in _in(tree[key])]
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in _in(item)]
    return []
