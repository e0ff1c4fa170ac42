"""Jobs: ranks of an elastic job that meet anew, in one launch."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

import ckpt_horovod
from ckpt_core import committed_steps
from ckpt_horovod.elastic import TorchState


def took_live(root: str, with_model: bool) -> dict[str, Any]:
    """A worker that is new meets one that has made steps, of parameters that no module holds, too."""
    model, loose, state = _made(root, with_model)
    with state:
        state.sync()
        _step(model, loose, state)
        state.commit()
    state.on_reset()
    if hvd.rank() == 1:
        model, loose, state = _made(root, with_model)
    with state:
        state.sync()
        found = [param.tolist() for param in (*model.parameters(), loose)]
        assert state.schedulers[0].optimizer is state.optimizer
        found.append(state.schedulers[0].last_epoch)
        _step(model, loose, state)
        state.commit()
    return {"found": found, "steps": committed_steps(root)}


def _made(root: str, with_model: bool) -> tuple[torch.nn.Module, torch.nn.Parameter, TorchState]:
    torch.manual_seed(hvd.rank())
    model, loose = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.rand(3))
    named = [("loose", loose), *model.named_parameters()]
    optimizer = ckpt_horovod.DistributedOptimizer(
        torch.optim.Adam([param for _, param in named], lr=0.1),
        named_parameters=[(f"took-live-{with_model}.{name}", param) for name, param in named],
        checkpointer=None,
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
    kept = TorchState(model if with_model else None, optimizer, root=root, schedulers=schedulers)
    return model, loose, kept


def _step(model: torch.nn.Module, loose: torch.Tensor, state: TorchState) -> None:
    state.optimizer.zero_grad()
    (model(torch.ones(1, 2)).sum() * loose.exp().sum()).backward()
    state.optimizer.step()
    state.schedulers[0].step()
